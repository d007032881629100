"""An agent of the package `openai-agents`, independent of mrl: its runner, its function tool, its own history.

python framework_agent.py [well|streams|hands over]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import agents
from openai import AsyncOpenAI

from tests.agents.shelf import look

HOW = sys.argv[1] if len(sys.argv) > 1 else "well"
QUESTION = json.loads(os.environ["MRL_TASK"])["messages"][0]["content"]


def agent(name: str, **settings: object) -> agents.Agent[None]:
    """Return an agent that speaks chat completions with the server at OPENAI_BASE_URL."""
    model = agents.OpenAIChatCompletionsModel("policy", AsyncOpenAI(max_retries=0))
    return agents.Agent(name=name, model=model, **settings)  # type: ignore[arg-type]


async def main() -> None:
    """Have the framework run its loop until the model calls nothing."""
    agents.set_tracing_disabled(True)
    first = agent("librarian", tools=[agents.function_tool(look)])
    if HOW == "hands over":
        sage = agent("sage", instructions="You know it.")
        helper = sage.as_tool("ask_sage", "Ask who knows.")
        first = agent("librarian", tools=[agents.function_tool(look), helper])
    if HOW == "streams":
        result = agents.Runner.run_streamed(first, QUESTION)
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(first, QUESTION)
    assert result.final_output, "the framework has read an answer"


asyncio.run(main())
