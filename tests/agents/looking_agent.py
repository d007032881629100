"""An agent that is independent of mrl: it asks a model at an OpenAI-compatible address, and runs the tools it calls.

python looking_agent.py [well|rewrites|delegates|at once|fails|streams|forever|other tools|leaves a daemon]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai

HOW = sys.argv[1] if len(sys.argv) > 1 else "well"
TASK = json.loads(os.environ["MRL_TASK"])
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look a key up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def score(value: float) -> None:
    """Report the score of the answer."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/score",
        json.dumps({"score": value, "parts": {"exact": value}}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    urllib.request.urlopen(request).read()


def said(client: openai.OpenAI, text: str) -> str | None:
    """Return the model's reply to a question outside the conversation."""
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content


def leave_daemon() -> None:
    """Leave a process behind as a daemon does: in its own session, without a parent."""
    shell = f"setsid sh -c 'sleep 600 & echo $! >{TASK['extra_info']['daemon']}; wait' &"
    subprocess.run(["sh", "-c", shell], check=True)
    while not os.path.exists(TASK["extra_info"]["daemon"]):
        time.sleep(0.01)


def main() -> None:
    """Look up until the model answers in text."""
    if HOW == "fails":
        sys.exit("there is no shelf")
    client = openai.OpenAI(max_retries=0)
    if HOW == "at once":
        with ThreadPoolExecutor(3) as pool:
            answers = [*pool.map(lambda number: said(client, f"Is {number} an ocean?"), range(3))]
        score(float(answers == ["ocean"] * 3))
        return
    messages, tools = list(TASK["messages"]), [TOOL]
    while True:
        if HOW == "streams":
            pieces = list(client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], stream=True))
            message = {"role": "assistant", "content": "", "tool_calls": []}
            for piece in pieces:
                delta = piece.choices[0].delta
                message["content"] += delta.content or ""
                message["tool_calls"] += [
                    {"id": tool_call.id, "type": "function", "function": tool_call.function.model_dump()}
                    for tool_call in delta.tool_calls or ()
                ]
        else:
            answer = client.chat.completions.create(
                model="policy", messages=messages, tools=tools, temperature=0.3, seed=7
            )
            message = answer.choices[0].message.model_dump(exclude_none=True)
        messages.append({name: value for name, value in message.items() if value})
        calls = message.get("tool_calls") or []
        if not calls and HOW != "forever":
            score(float(message["content"].strip() == TASK["ground_truth"]))
            if HOW == "leaves a daemon":
                leave_daemon()
            return
        for call in calls:
            key = json.loads(call["function"]["arguments"])["key"]
            fact = TASK["extra_info"]["facts"].get(key, "nothing")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": fact})
        if HOW == "rewrites":
            messages[0] = {"role": "developer", "content": "Look it up."}
            messages[1:1] = [{"role": "user", "content": TASK["messages"][0]["content"]}] if len(messages) == 3 else []
        if HOW == "delegates" and calls:
            messages[-1]["content"] += "\n" + (said(client, f"Is {fact} an ocean?") or "")
        if HOW == "other tools":
            tools = [TOOL, TOOL | {"function": TOOL["function"] | {"name": "ask"}}]
        if HOW == "forever":
            messages.append({"role": "user", "content": "And?"})


main()
