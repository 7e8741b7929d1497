#!/usr/bin/env python3
"""Draws conversations, answers and requests, and what DeepSeek's own package makes of them.

    python3 -m venv venv && venv/bin/pip install deepseek-recipe==0.2.0
    venv/bin/python tests/clients/recipe_cases.py DIR --count 2000 --seed 1
    DS4_CASES=DIR cargo test -p burn-ds4 --lib makers

The files have the form of those in crates/burn-ds4/tests/data, which the same tests read. What is
decided otherwise on purpose (docs/serving.md, Choices) is not drawn.
"""

import argparse
import json
import random
from pathlib import Path

import deepseek_recipe as recipe

MARK = "｜DSML｜"
WORDS = ["tide", "é", "<think>", "</tool_result>", "海", '"', "\n", "\n\n", "🙂", "{}", "a\\b",
         "1e-7", "<｜User｜>", "json", "'", " ", "<", "</", "&amp;", "\t", "0.00004", "You are", "｜"]
NAMES = ["depth", "tides", "f", "get_all-2"]
KEYS = ["a", "berth", "名", "x.y", "$ref", "type", "A"]


def text(draw, most=5, words=WORDS):
    return "".join(draw.choice(words) for _ in range(draw.randrange(most + 1)))


def value(draw, depth=2):
    kind = draw.randrange(8 if depth else 6)
    if kind == 6:
        return [value(draw, depth - 1) for _ in range(draw.randrange(3))]
    if kind == 7:
        return {draw.choice(KEYS): value(draw, depth - 1) for _ in range(draw.randrange(3))}
    number = draw.uniform(-1, 1) * 10 ** draw.randrange(-9, 9)
    return [text(draw), draw.randrange(-9, 10**6), number, None, True, draw.randrange(2**62)][kind]


def tool(draw, name):
    properties = {key: {"type": draw.choice(["string", "integer", "number"])}
                  for key in draw.sample(KEYS, draw.randrange(3))}
    schema = {"type": "object", "properties": properties}
    if draw.random() < 0.5:
        schema["required"] = list(properties)
    if draw.random() < 0.2:
        schema["properties"]["n"] = {"type": "number", "multipleOf": 4e-05, "default": 1.5}
    function = {"name": name, "parameters": schema}
    if draw.random() < 0.7:
        function["description"] = text(draw)
    return {"type": "function", "function": function}


def messages(draw, with_tools):
    found = []
    for _ in range(draw.randrange(1, 7)):
        role = draw.choice(["system", "user", "user", "assistant", "latest_reminder"])
        message = {"role": role, "content": text(draw)}
        found.append(message)
        if role != "assistant":
            continue
        if draw.random() < 0.5:
            message["reasoning_content"] = text(draw)
        if with_tools and draw.random() < 0.6:
            calls = []
            for index in range(draw.randrange(1, 4)):
                arguments = json.dumps(
                    {draw.choice(KEYS): value(draw) for _ in range(draw.randrange(3))},
                    ensure_ascii=draw.random() < 0.5)
                arguments = draw.choice([arguments] * 8 + ["[1, 2", "", "7"])
                calls.append({"id": f"call_{index:02}_{draw.randrange(99)}",
                              "name": draw.choice(NAMES), "arguments": arguments})
            message["tool_calls"] = calls
            for call in draw.sample(calls, len(calls)):
                found.append({"role": "tool", "tool_call_id": call["id"], "content": text(draw)})
    found.append({"role": "user", "content": text(draw)})
    return found


def of_wheel(message):
    role, content = message["role"], message["content"]
    if role == "system":
        return recipe.SystemMessage(content)
    if role == "user":
        return recipe.UserMessage(content)
    if role == "tool":
        return recipe.ToolMessage(content, message["tool_call_id"])
    if role == "latest_reminder":
        return recipe.LatestReminderMessage(content)
    calls = message.get("tool_calls")
    calls = calls and [recipe.ToolCall(c["id"], c["name"], c["arguments"]) for c in calls]
    return recipe.AssistantMessage(content, message.get("reasoning_content"), calls)


def prompt_case(draw, number):
    with_tools = draw.random() < 0.6
    case = {"name": f"prompt {number}", "thinking": draw.random() < 0.5, "encoding": "0731",
            "messages": messages(draw, with_tools)}
    if with_tools:
        case["tools"] = [tool(draw, name) for name in draw.sample(NAMES, draw.randrange(1, 4))]
    if draw.random() < 0.5:
        case["effort"] = draw.choice(["low", "high", "max"])
    if draw.random() < 0.2:
        case["json_object"] = True
    elif draw.random() < 0.3:
        case["schema"] = value(draw) if draw.random() < 0.3 else {"type": "object"}
        if case["schema"] is None:
            del case["schema"]
    functions = [one["function"] for one in case.get("tools", [])]
    conversation = recipe.Conversation(
        [of_wheel(message) for message in case["messages"]],
        thinking_mode=case["thinking"],
        tools=[recipe.ToolDefinition(f["name"], f.get("description"), f["parameters"])
               for f in functions],
        reasoning_effort=case.get("effort"),
        response_format="json_object" if case.get("json_object") else "text",
        response_schema=case.get("schema"),
    )
    encoding = recipe.DeepseekV4Encoding()
    case["prompt"] = encoding.render_conversation(conversation).prompt
    return case


def answer_text(draw, thinking):
    # After what begins like a tag, the package reads line breaks of text not as those of tokens.
    words = ["Eleven metres.", "\n", "\n\n", "The chart", " ", "é🙂", "{", '"', "]", "then"]
    values = words + ["<", "</", "</think"]
    gap = lambda: draw.choice(["", "\n", "\n", "\n  ", "\n\n"])
    parts = [text(draw, 4, words)]
    if thinking and draw.random() < 0.85:
        parts += ["</think>", text(draw, 4, words)]
    if draw.random() < 0.7:
        if draw.random() < 0.9:
            parts.append(f"{gap()}<{MARK}tool_calls>{gap()}")
        for _ in range(draw.randrange(1, 4)):
            parts.append(f'<{MARK}invoke name="{draw.choice(NAMES)}">{gap()}')
            for _ in range(draw.randrange(4)):
                key = draw.choice(["a", "berth", "名", "x.y"])
                if draw.random() < 0.5:
                    kind, written = "true", text(draw, 4, values).rstrip("</")
                else:
                    kind, written = "false", json.dumps(value(draw), ensure_ascii=False)
                parts.append(f'<{MARK}parameter name="{key}" string="{kind}">{written}'
                             f"</{MARK}parameter>{gap()}")
            parts.append(f"</{MARK}invoke>{gap()}{draw.choice(['', '', 'and '])}")
        if draw.random() < 0.8:
            parts.append(f"</{MARK}tool_calls>")
        if draw.random() < 0.3:
            parts.append(text(draw, 3, words))
    return "".join(parts)


def answer_case(draw, number, request):
    thinking = draw.random() < 0.5
    written = answer_text(draw, thinking)
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    options = recipe.ParsingOptions(thinking_initial_stage=stage)
    generator = recipe.ChatCompletionRequest.chunk_generator(request(thinking), "id", "m")
    processor = recipe.StreamProcessor(generator, options)
    whole = recipe.ChatCompletionResponse("id", "m", 0, 0, 0)
    chunks = processor.push(recipe.InferenceChunk.text(written, 1))
    chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    chunks += processor.finish()
    for chunk in chunks:
        whole.accumulate(chunk)
    choice = json.loads(whole.to_json())["choices"][0]
    message = choice["message"]
    return {
        "name": f"answer {number}", "thinking": thinking, "tools": True, "text": written,
        "reasoning": message.get("reasoning_content") or "",
        "content": message["content"] or "",
        "calls": [call["function"] for call in message.get("tool_calls") or []],
        "finish": choice["finish_reason"],
    }


def request_body(draw):
    with_tools = draw.random() < 0.5
    said = messages(draw, with_tools)
    for message in said:
        for call in message.get("tool_calls", []):
            name, arguments = call.pop("name"), call.pop("arguments")
            call |= {"type": "function", "function": {"name": name, "arguments": arguments}}
        if message["role"] in ("user", "system") and draw.random() < 0.3:
            parts = [{"type": "text", "text": text(draw)} for _ in range(draw.randrange(1, 3))]
            if draw.random() < 0.3:
                parts.append({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}})
            message["content"] = parts
    body = {"model": "DeepSeek-V4-Pro", "messages": said}
    switch = draw.randrange(3)
    if switch:
        body["reasoning_effort"] = draw.choice(
            ["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max", "most"])
    if switch != 1:
        body["thinking"] = {"type": draw.choice(["enabled", "disabled", "adaptive"])}
    if with_tools:
        body["tools"] = [tool(draw, name) for name in draw.sample(NAMES, draw.randrange(1, 4))]
        name = draw.choice(NAMES)
        named = {"type": "function", "function": {"name": name}}
        choices = ["auto", "none", "required", named, None, None]
        if (choice := draw.choice(choices)) is not None:
            body["tool_choice"] = choice
        if draw.random() < 0.1:
            for one in body["tools"]:
                one["function"]["strict"] = True
    # `stream_options` alone, `tool_calls: []` and parameters without a type are taken on purpose.
    fault = draw.randrange(11)
    if fault == 0:
        said.insert(0, {"role": "tool", "tool_call_id": "call_00_x", "content": "r"})
    elif fault == 1 and with_tools:
        body["tools"].append(body["tools"][0])
    elif fault == 2 and with_tools:
        body["tools"][0]["function"]["name"] = draw.choice(["", "a b", "x" * 129])
    elif fault == 3 and with_tools:
        body["tools"][0]["function"]["parameters"] = draw.choice(
            [{"type": "string"}, {"type": "object", "properties": 7}])
    elif fault == 4:
        said.append({"role": "assistant", "content": "Elev", "prefix": True})
    elif fault == 5:
        said.insert(0, {"role": "assistant", "content": "Elev", "prefix": True})
    elif fault == 6:
        del said[:]
    return body


def request_case(draw, number):
    body = request_body(draw)
    case = {"name": f"request {number}", "body": body, "accept": True}
    try:
        options = recipe.ConversionOptions(default_thinking_mode=False)
        request = recipe.ChatCompletionRequest(json.dumps(body))
        conversation = request.convert(options).conversation
        encoding = recipe.DeepseekV4Encoding()
        case["prompt"] = encoding.render_conversation(conversation).prompt
    except Exception:
        case["accept"] = False
    return case


def converted(thinking):
    kind = "enabled" if thinking else "disabled"
    body = {"model": "DeepSeek-V4-Pro", "thinking": {"type": kind},
            "messages": [{"role": "user", "content": "u"}]}
    request = recipe.ChatCompletionRequest(json.dumps(body))
    return request.convert(recipe.ConversionOptions())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=2000, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(args.seed)
    kinds = {
        "prompts": prompt_case,
        "answers": lambda draw, number: answer_case(draw, number, converted),
        "requests": request_case,
    }
    for name, of in kinds.items():
        path = args.directory / f"{name}.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            for number in range(args.count):
                file.write(json.dumps(of(draw, number), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
