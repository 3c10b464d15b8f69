"""The notebooks as a learner has them: JupyterLab, Run All, sliders moved by keyboard, an exercise answered."""

from collections.abc import Iterator
from typing import Any

import pytest

NOTEBOOKS = {"00_start_here": 3, "05_counting_steps": 4, "04_gradient_accumulation": 3}
"""Those that are tried, and how many sliders each has."""
ANSWERS = {
    "00_start_here": ("first_answer.check(", "my_answer = 10", "is the number of optimizer steps", "my_answer = 40"),
    "05_counting_steps": ("count_by_hand.check(", "my_count = 40", "leaves out the short window", "my_count = 45"),
}
"""What the cell with the check holds, a wrong answer, what the check says to it, and the right one."""
DONE = """() => {
    const prompts = [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].map((p) => p.textContent.trim())
    return prompts.length > 5 && prompts.every((prompt) => /\\[\\d+\\]/.test(prompt))
}"""
SHOWN = """async (box) => {
    const bytes = await (await fetch(box.querySelector("img").src)).arrayBuffer()
    const digest = await crypto.subtle.digest("SHA-256", bytes)
    return [new Uint8Array(digest).join(), box.querySelector("pre").textContent]
}"""

PLACE = "(cell) => [...document.querySelectorAll('.jp-Cell')].indexOf(cell)"
OTHER = f"""async ([box, before]) => {{
    const now = await ({SHOWN})(box)
    return now[0] !== before[0] && now[1] !== before[1]
}}"""


@pytest.fixture(scope="module")
def notebook(request: pytest.FixtureRequest, chromium: Any, lab: str) -> Iterator[tuple[str, Any]]:
    """A notebook in JupyterLab after Run All, and its name."""
    page = chromium.new_page(viewport={"width": 1400, "height": 1000})
    # In a workspace of its own: another's notebook would come back, and its cells be in the page.
    page.goto(f"{lab}/lab/workspaces/{request.param}/tree/{request.param}.ipynb")
    page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=60_000)
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)  # cells that run earlier ask for a kernel
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(f"() => !({DONE})()")  # the stored numbers give way to [*]
    page.wait_for_function(DONE, timeout=200_000)
    yield request.param, page
    page.close()


@pytest.mark.parametrize("notebook", list(NOTEBOOKS), indirect=True)
def test_run_all_reaches_the_bottom_and_sliders_move_by_keyboard(notebook: tuple[str, Any]):
    name, page = notebook
    sliders = page.locator(".widget-slider .noUi-handle")
    assert sliders.count() == NOTEBOOKS[name]
    for slider in sliders.all():
        box = slider.locator("xpath=ancestor::*[contains(@class, 'widget-vbox')][1]")
        before, value = box.evaluate(SHOWN), slider.get_attribute("aria-valuenow")
        slider.focus()
        slider.press("ArrowRight")
        if slider.get_attribute("aria-valuenow") == value:  # it was at its end
            slider.press("ArrowLeft")
        page.wait_for_function(OTHER, arg=[box.element_handle(), before], timeout=15_000)


@pytest.mark.parametrize("notebook", list(ANSWERS), indirect=True)
def test_an_exercise_names_a_mistake_and_accepts_the_answer(notebook: tuple[str, Any]):
    name, page = notebook
    check, wrong, says, right = ANSWERS[name]
    place = page.locator(".jp-CodeCell").filter(has_text=f"{right.partition('=')[0]}= ...").evaluate(PLACE)
    stub = page.locator(".jp-Cell").nth(place)
    output = page.locator(".jp-CodeCell").filter(has_text=check).locator(".jp-OutputArea")
    for answer, reply in ((wrong, says), (right, "solved.")):
        stub.locator(".cm-content").click()
        page.keyboard.press("Control+A")
        page.keyboard.type(answer)
        page.keyboard.press("Shift+Enter")  # on to the check
        page.keyboard.press("Shift+Enter")
        output.get_by_text(reply).first.wait_for(timeout=15_000)
    assert "NotSolved" not in output.inner_text()
