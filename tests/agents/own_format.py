"""A format as a user would write it."""

from __future__ import annotations

import re

from mrl.agents.environment import ToolCall
from mrl.agents.formats import Format


class Brackets(Format):
    """Reads calls of the form `[[tool: argument]]`."""

    stops = ("]]",)

    def parse(self, text: str) -> list[ToolCall]:
        return [ToolCall(name=name, arguments={"it": it}) for name, it in re.findall(r"\[\[(\w+): (.*?)\]\]", text)]
