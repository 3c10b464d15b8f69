"""One way to make a widget that works in the browser, and in a test without one.

``interact`` and ``Output`` write through the kernel's streams, with ids that differ from run to run. An
:class:`Explorer` draws into an image and a text instead, so that a stored notebook compares equal, and a cell can
move the controls to test what the reader will see.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython.display import display
from matplotlib.figure import Figure

from workbook.display import png_bytes


def int_slider(value: int, highest: int, name: str, lowest: int = 1) -> ipywidgets.IntSlider:
    """A slider that reports when it is let go: a figure a step would lag behind."""
    return ipywidgets.IntSlider(value=value, min=lowest, max=highest, description=name, continuous_update=False)


class Explorer:
    """Controls above a picture and a text that follow them.

    Args:
        controls: The widgets by the names under which ``render`` takes their values.
        render: Called with the controls' values; returns a figure and a text. A ``ValueError`` is shown as text.
        title: What the reader sees where no kernel runs.
    """

    def __init__(self, controls: dict[str, Any], render: Callable[..., tuple[Figure, str]], *, title: str) -> None:
        self.controls = controls
        self.title = title
        self.text = ""
        self._render = render
        self._image = ipywidgets.Image(format="png")
        self._html = ipywidgets.HTML()
        for control in controls.values():
            control.style.description_width = "initial"
            control.layout.width = f"{16 + len(control.description) // 2}em"  # half an em for a letter
            control.layout.max_width = "100%"
            control.observe(self._update, names="value")
        self._update()

    def _update(self, _: object = None) -> None:
        try:
            figure, self.text = self._render(**{name: control.value for name, control in self.controls.items()})
            self._image.value = png_bytes(figure)
        except ValueError as error:
            self.text = str(error)
        self._html.value = f"<pre>{html.escape(self.text)}</pre>"

    def set(self, **values: object) -> str:
        """Move controls as a reader would, and return the text that follows."""
        for name, value in values.items():
            self.controls[name].value = value
        return self.text

    def show(self) -> None:
        """Display the widget; where no kernel runs, a line says what would be there."""
        controls = ipywidgets.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        box = ipywidgets.VBox([controls, self._image, self._html])
        bundle = dict(box._repr_mimebundle_())
        bundle["text/plain"] = f"[interactive: {self.title}. Run this cell in JupyterLab to move the controls.]"
        display(bundle, raw=True)
