#!/usr/bin/env python3
"""Checks a running server with Anthropic's own client: messages, streams, tools, errors.

    python3 tests/clients/tool_checkpoint.py /tmp/tools
    cargo run --release -- serve --model /tmp/tools &
    python3 -m venv venv && venv/bin/pip install anthropic
    venv/bin/python tests/clients/anthropic_client.py --url http://127.0.0.1:8080

It ends with exit code 0 and a line for each check, or with a traceback.
"""

import argparse
import json

import anthropic

WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Oslo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
}
QUESTION = {"role": "user", "content": "How is the weather?"}


class Checks:
    def __init__(self, client):
        self.client = client
        self.model = "tools"

    def fields(self, **fields):
        return {"model": self.model, "max_tokens": 12, "messages": [QUESTION]} | fields

    def create(self, **fields):
        return self.client.messages.create(**self.fields(**fields))

    def check_message(self):
        answer = self.create(system="Be brief.")
        assert answer.content[0].type == "text" and answer.content[0].text, answer
        assert answer.stop_reason in ("max_tokens", "end_turn"), answer
        assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0, answer

    def check_stream(self):
        whole = self.create()
        with self.client.messages.stream(**self.fields()) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text, (text, whole)
        assert final.usage.output_tokens == whole.usage.output_tokens, (final, whole)
        assert final.stop_reason == whole.stop_reason, final

    def check_format(self):
        schema = {
            "type": "object",
            "properties": {"king": {"enum": ["Saul", "David"]}},
            "required": ["king"],
            "additionalProperties": False,
        }
        form = {"format": {"type": "json_schema", "schema": schema}}
        answer = self.create(extra_body={"output_config": form}, max_tokens=60)
        assert json.loads(answer.content[0].text)["king"] in ("Saul", "David"), answer

    def check_thinking(self):
        answer = self.create(thinking={"type": "enabled", "budget_tokens": 1024})
        assert answer.content[0].type == "thinking" and answer.content[0].signature, answer
        # It goes back as it came.
        turn = {"role": "assistant", "content": answer.content}
        self.create(messages=[QUESTION, turn, QUESTION])

    def check_tools(self):
        fields = {"tools": [WEATHER], "max_tokens": 300}
        for choice in [{"type": "any"}, {"type": "tool", "name": "weather"}]:
            answer = self.create(tool_choice=choice, **fields)
            assert answer.stop_reason == "tool_use", answer
            (call,) = [block for block in answer.content if block.type == "tool_use"]
            assert call.name == "weather" and call.input["city"] in ("Rome", "Oslo"), call
        with self.client.messages.stream(**self.fields(tool_choice=choice, **fields)) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        assert {"input_json", "content_block_stop", "message_stop"} <= kinds, kinds
        assert final.content[-1].input["city"] in ("Rome", "Oslo"), final
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
        messages = [
            QUESTION,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        self.create(messages=messages, tools=[WEATHER])

    def check_count(self):
        counted = self.client.messages.count_tokens(model=self.model, messages=[QUESTION])
        assert counted.input_tokens == self.create().usage.input_tokens, counted

    def check_errors(self):
        cases = [
            ({"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
            ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        ]
        for fields, kind, name in cases:
            try:
                self.create(**fields)
            except kind as error:
                assert error.body["error"]["type"] == name, (fields, error.body)
            else:
                raise AssertionError(f"{fields} is not refused")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    args = parser.parse_args()
    checks = Checks(anthropic.Anthropic(base_url=args.url, api_key="none", max_retries=0))
    for name in sorted(name for name in dir(checks) if name.startswith("check_")):
        getattr(checks, name)()
        print(f"{name.removeprefix('check_')}: ok")


if __name__ == "__main__":
    main()
