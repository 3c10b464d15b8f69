// A message that is pasted holds signs that mean something in the search's own language: "stopped:" would be a field.
document.addEventListener(
  "input",
  ({ target }) => {
    if (target.matches("[data-md-component=search-query]")) {
      target.value = target.value.replace(/[:~^*+"`]/g, " ")
    }
  },
  { capture: true },
)
