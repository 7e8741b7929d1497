#!/usr/bin/env python3
"""Checks a running server with an agent of pydantic-ai: types of answers, tools, effort.

    python3 tests/clients/tool_checkpoint.py /tmp/tools
    cargo run --release -- serve --model /tmp/tools &
    python3 -m venv venv && venv/bin/pip install 'pydantic-ai-slim[openai]'
    venv/bin/python tests/clients/agent_client.py --url http://127.0.0.1:8080/v1

It ends with exit code 0 and a line for each check, or with a traceback.
"""

import argparse
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class King(BaseModel):
    name: Literal["Saul", "David", "Solomon"]
    sons: Literal[1, 2, 3]


def settings(**fields):
    return {"max_tokens": 400, "temperature": 1.0, "seed": 3} | fields


def check_output_type(model):
    """By a call that has to come."""
    agent = Agent(model, output_type=King, model_settings=settings(), retries=0)
    king = agent.run_sync("Who was the first king?").output
    assert isinstance(king, King), king


def check_native_output(model):
    """By a schema of the answer."""
    agent = Agent(model, output_type=NativeOutput(King), model_settings=settings(), retries=0)
    king = agent.run_sync("Who was the first king?").output
    assert isinstance(king, King), king


def check_tools(model):
    """A tool is called and answered before the answer itself, which is a call, too."""
    asked = []
    agent = Agent(model, output_type=King, model_settings=settings(), retries=0)

    @agent.tool_plain
    def reign(king: Literal["Saul", "David"]) -> str:
        asked.append(king)
        return "Forty years."

    for seed in range(12):
        result = agent.run_sync("Who reigned?", model_settings=settings(seed=seed))
        assert isinstance(result.output, King), result
        if asked:
            break
    assert asked, "no seed calls the tool"


def check_effort(model):
    agent = Agent(model, model_settings=settings(max_tokens=12, openai_reasoning_effort="medium"))
    # Twelve tokens of reasoning are no answer.
    try:
        result = agent.run_sync("Who made the heaven?")
    except Exception as error:
        assert "token limit" in str(error) or "empty" in str(error).lower(), error
        return
    details = result.usage().details
    assert details.get("reasoning_tokens", 0) > 0, details


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    args = parser.parse_args()
    provider = OpenAIProvider(base_url=args.url, api_key="none")
    model = OpenAIChatModel("tools", provider=provider)
    for check in [check_output_type, check_native_output, check_tools, check_effort]:
        check(model)
        print(f"{check.__name__.removeprefix('check_')}: ok")


if __name__ == "__main__":
    main()
