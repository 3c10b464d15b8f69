// A message that is pasted holds signs that mean something in the search's own language: "stopped:" would be a field,
// "-1" a word to leave out.
// The search waits for a key to be released, which a mouse that pastes does not do.
document.addEventListener("input", ({ target }) => {
  if (target.matches("[data-md-component=search-query]")) {
    const { selectionStart, selectionEnd } = target
    target.value = target.value.replace(/[:~^*+"`]|(?<=^|\s)-/g, " ")
    target.setSelectionRange(selectionStart, selectionEnd)
    target.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }))
  }
})
