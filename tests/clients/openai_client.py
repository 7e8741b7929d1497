#!/usr/bin/env python3
"""Checks a running server with OpenAI's own client.

    cargo run --release -- serve &
    python3 -m venv venv && venv/bin/pip install openai
    venv/bin/python tests/clients/openai_client.py --url http://127.0.0.1:8080/v1

It ends with exit code 0 and a line for each check, or with a traceback. The tokenizer of the
shipped checkpoint has no token for the markup of tool calls, so that a request with tools is
refused. With a model named `tools`, which tool_checkpoint.py writes, calls are checked:

    python3 tests/clients/tool_checkpoint.py /tmp/tools
    cargo run --release -- serve --model /tmp/tools
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


class Checks:
    def __init__(self, client, model):
        self.client = client
        self.model = model

    def chat(self, **fields):
        messages = [{"role": "user", "content": "Who made the heaven?"}]
        fields = {"model": self.model, "messages": messages, "max_tokens": 16} | fields
        return self.client.chat.completions.create(**fields)

    def check_models(self):
        assert self.model in [model.id for model in self.client.models.list()]
        assert self.client.models.retrieve(self.model).id == self.model

    def check_chat(self):
        answer = self.chat()
        message = answer.choices[0].message
        assert message.role == "assistant" and message.content, answer
        assert answer.choices[0].finish_reason in ("stop", "length"), answer
        assert answer.usage.total_tokens > answer.usage.completion_tokens > 0, answer
        assert answer.system_fingerprint, answer

    def check_stream(self):
        fields = {"temperature": 1, "seed": 3, "n": 2}
        whole = self.chat(**fields)
        texts, usage = ["", ""], None
        for chunk in self.chat(stream=True, stream_options={"include_usage": True}, **fields):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices], (texts, whole)
        assert usage == whole.usage, (usage, whole.usage)

    def check_completion(self):
        answer = self.client.completions.create(
            model=self.model, prompt=["In the", "And God"], max_tokens=5, logprobs=2
        )
        assert [choice.index for choice in answer.choices] == [0, 1], answer
        for choice in answer.choices:
            assert "".join(choice.logprobs.tokens) == choice.text, choice

    def check_log_probs(self):
        choice = self.chat(logprobs=True, top_logprobs=3).choices[0]
        listed = choice.logprobs.content
        assert b"".join(bytes(token.bytes) for token in listed).decode() == choice.message.content
        assert all(len(token.top_logprobs) == 3 for token in listed), listed

    def check_seeds(self):
        def text(seed):
            return self.chat(temperature=1.2, seed=seed).choices[0].message.content

        alone = text(1)
        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(text, [1, 2, 3, 1, 4, 5, 1, 6]))
        assert [texts[0], texts[3], texts[6]] == [alone] * 3, (alone, texts)
        response = self.client.chat.completions.with_raw_response.create(
            model=self.model,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=8,
            temperature=1.2,
        )
        assert int(response.headers["x-ds4-seed"]) >= 0
        assert response.headers["x-ds4-deterministic"] in ("true", "false")

    def check_tools(self):
        try:
            self.chat(tools=TOOLS, max_tokens=1)
        except openai.BadRequestError as error:
            # The tokenizer of the shipped checkpoint has no token for the markup of calls.
            assert "DSML" in error.message and not self.has_calls(), error
            return
        assert self.has_calls(), "the checkpoint is not one that can be made to write calls"
        fields = {
            "tools": TOOLS,
            "max_tokens": 4,
            # Each is far above the next, and one that has occurred loses its bias.
            "logit_bias": {"1021": 100, "1022": 75, "1023": 50, "1": 25},
            "extra_body": {"repetition_penalty": 1e6},
        }
        choice = self.chat(**fields).choices[0]
        message = choice.message
        assert choice.finish_reason == "tool_calls", choice
        assert message.content == "Let me see.", message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert [name for name, _ in calls] == ["weather", "now"], calls
        assert [json.loads(text) for _, text in calls] == [{"city": "Rome"}, {}], calls
        content, streamed = "", {}
        for chunk in self.chat(stream=True, **fields):
            for delta in (choice.delta for choice in chunk.choices):
                content += delta.content or ""
                for call in delta.tool_calls or []:
                    name, arguments = streamed.get(call.index, ("", ""))
                    name += call.function.name or ""
                    streamed[call.index] = name, arguments + (call.function.arguments or "")
        assert content == "Let me see.", content
        assert [streamed[index] for index in sorted(streamed)] == calls, streamed
        # The answer goes back as it came, with the results of its calls.
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
            for call in reversed(message.tool_calls)
        ]
        question = {"role": "user", "content": "How is it in Rome?"}
        self.chat(messages=[question, message, *results], tools=TOOLS, max_tokens=2)

    def check_forced_calls(self):
        if not self.has_calls():
            return
        function = TOOLS[0]["function"] | {"parameters": {
            "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"], "additionalProperties": False}}
        tools = [{"type": "function", "function": function}]
        named = {"type": "function", "function": {"name": "weather"}}
        for choice in ["required", named]:
            fields = {"tools": tools, "tool_choice": choice, "max_tokens": 300}
            (call,) = self.chat(**fields).choices[0].message.tool_calls
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call

    def check_responses(self):
        fields = {"model": self.model, "input": "Who made the heaven?", "max_output_tokens": 16}
        answer = self.client.responses.create(**fields)
        assert answer.output_text and answer.usage.output_tokens == 16, answer
        events = list(self.client.responses.create(stream=True, **fields))
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == answer.output_text, (text, answer)
        assert events[-1].type == "response.incomplete", events[-1]
        if not self.has_calls():
            return
        tool = {"type": "function", "name": "weather", "parameters": {
            "type": "object", "required": ["city"],
            "properties": {"city": {"type": "string", "enum": ["Rome"]}},
            "additionalProperties": False}, "strict": True}
        fields |= {"tools": [tool], "max_output_tokens": 300}
        answer = self.client.responses.create(tool_choice="required", **fields)
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"city": "Rome"}, call
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        said = [{"role": "user", "content": fields.pop("input")}, *answer.output, result]
        self.client.responses.create(input=said, **fields)

    def check_reasoning(self):
        for effort in ["minimal", "medium", "xhigh"]:
            answer = self.chat(reasoning_effort=effort)
            details = answer.usage.completion_tokens_details
            assert 0 < details.reasoning_tokens <= 16, answer
        answer = self.chat(reasoning_effort="high", extra_body={"thinking": {"type": "disabled"}})
        assert answer.usage.completion_tokens_details is None, answer

    def has_calls(self):
        return self.model == "tools"

    def check_response_format(self):
        schema = {
            "type": "object",
            "properties": {
                "kind": {"enum": ["king", "prophet"]},
                "age": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["kind", "age"],
            "additionalProperties": False,
        }
        format = {"name": "person", "strict": True, "schema": schema}
        for seed in range(4):
            choice = self.chat(
                response_format={"type": "json_schema", "json_schema": format},
                max_tokens=60,
                temperature=1,
                seed=seed,
            ).choices[0]
            assert choice.finish_reason == "stop", choice
            person = json.loads(choice.message.content)
            assert list(person) == ["kind", "age"], person
            assert person["kind"] in ("king", "prophet") and 1 <= person["age"] <= 99, person
        choice = self.chat(response_format={"type": "json_object"}).choices[0]
        assert choice.message.content.startswith("{"), choice

    def check_stop(self):
        text = self.chat().choices[0].message.content
        stop = text[4:8]
        choice = self.chat(stop=[stop]).choices[0]
        assert choice.finish_reason == "stop", choice
        assert choice.message.content == text[: text.index(stop)], (text, choice)

    def check_errors(self):
        cases = [
            ({"model": "no-such-model"}, openai.NotFoundError, None),
            ({"temperature": -1}, openai.BadRequestError, "temperature"),
            ({"messages": []}, openai.BadRequestError, "messages"),
            (
                {"response_format": {"type": "json_schema"}},
                openai.BadRequestError,
                "response_format",
            ),
            ({"extra_body": {"min_p": 7}}, openai.BadRequestError, "min_p"),
        ]
        for fields, kind, param in cases:
            try:
                self.chat(**fields)
            except kind as error:
                assert error.param == param, (fields, error)
            else:
                raise AssertionError(f"{fields} is not refused")

    def check_leaving(self):
        # The server goes on for others while a stream is left in the middle.
        stream = self.chat(stream=True, max_tokens=2000)
        next(iter(stream))
        stream.close()
        self.check_chat()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--key", default="none")
    parser.add_argument("--model", help="default: the first that the server lists")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key=args.key, max_retries=0)
    model = args.model or next(iter(client.models.list())).id
    checks = Checks(client, model)
    for name in sorted(name for name in dir(checks) if name.startswith("check_")):
        getattr(checks, name)()
        print(f"{name.removeprefix('check_')}: ok")


if __name__ == "__main__":
    main()
