// What the theme leaves without a name or out of a keyboard's reach; it wraps wide tables some time after loading.
document.querySelector(".md-search").ariaLabel = "Search"
const reachable = () => {
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap")) wide.tabIndex = 0
}
new MutationObserver(reachable).observe(document.body, { childList: true, subtree: true })
reachable()
