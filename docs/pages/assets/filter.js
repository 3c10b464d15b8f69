// Rows of a table that hold all words typed, and the choices made: for each <div class="filtered"> with a table.
for (const place of document.querySelectorAll(".filtered")) {
  const rows = [...place.querySelectorAll("tbody tr")]
  const controls = document.createElement("p")
  controls.className = "filters"
  const words = document.createElement("input")
  words.type = "search"
  words.placeholder = words.ariaLabel = "Filter the rows"
  const count = document.createElement("output")
  const choices = [...place.querySelectorAll("th")].flatMap((heading, column) => {
    if (!("choices" in heading.dataset)) return []
    const select = document.createElement("select")
    const name = heading.textContent
    const values = new Set(rows.map((row) => row.cells[column].textContent))
    select.ariaLabel = name
    select.append(new Option(`any ${name}`, ""), ...[...values].map((value) => new Option(value)))
    return [{ column, select }]
  })
  const show = () => {
    const typed = words.value.toLowerCase().split(/\s+/)
    for (const row of rows) {
      const text = row.textContent.toLowerCase()
      const chosen = choices.every(({ column, select }) => ["", row.cells[column].textContent].includes(select.value))
      row.hidden = !(chosen && typed.every((word) => text.includes(word)))
    }
    count.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`
  }
  controls.append(words, ...choices.map(({ select }) => select), count)
  controls.addEventListener("input", show)
  place.prepend(controls)
  show()
}
