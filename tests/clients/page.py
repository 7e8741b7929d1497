#!/usr/bin/env python3
"""Drives the page of the server in a headless Chromium.

    cargo build
    python3 -m venv venv && venv/bin/pip install selenium    # and Chromium with chromedriver
    venv/bin/python tests/clients/page.py target/debug/burn-ds4

It ends with exit code 0 and a line for each check, or with a traceback.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

KEY = "a key of the test"
QUESTION = "Who made the heaven?"
# Far more than an answer takes, on a machine that has other work.
SECONDS = 120


@contextmanager
def serving(program, *options):
    """Runs a server; yields its address."""
    command = [program, "serve", "--port", "0", *options]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        line = next(line for line in server.stdout if line.startswith("listening on "))
        yield line.split()[-1]
    finally:
        server.terminate()
        assert server.wait(SECONDS) == 0, "the server ends cleanly"


@contextmanager
def below(url, prefix):
    """Has a server answer below a path of another one; yields the address of that path."""

    class Mount(BaseHTTPRequestHandler):
        def do_GET(self):
            self.forward(None)

        def do_POST(self):
            self.forward(self.rfile.read(int(self.headers["content-length"])))

        def forward(self, body):
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            path = self.path.removeprefix(prefix) or "/"
            request = urllib.request.Request(url + path, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=SECONDS) as response:
                text = response.read()
                self.send_response(response.status)
                self.send_header("content-type", response.headers["content-type"])
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Mount) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
        server.shutdown()


class Page:
    def __init__(self, browser, url):
        self.browser = browser
        self.url = url
        browser.get(url)
        self.element("summary").click()

    def element(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.element(selector).text

    def texts(self, selector):
        elements = self.browser.find_elements(By.CSS_SELECTOR, selector)
        return [element.get_property("textContent") for element in elements]

    def wait_for(self, condition):
        return WebDriverWait(self.browser, SECONDS).until(lambda _: condition())

    def set(self, **options):
        for name, value in options.items():
            field = self.element(f"#{name}")
            if field.tag_name == "select":
                Select(field).select_by_visible_text(value)
            else:
                field.clear()
                field.send_keys(str(value))

    def is_idle(self):
        return self.element("#send").is_enabled() and not self.element("#stop").is_enabled()

    def ask(self, text):
        """Sends a message and waits for the end of the answer."""
        self.element("#input").send_keys(text, Keys.ENTER)
        self.wait_for(self.is_idle)

    def answers(self):
        return self.texts("article.assistant > pre:not(.error):not(.call)")

    def errors(self):
        return self.texts("pre.error")

    def answer_of_api(self, messages, **fields):
        body = {"messages": messages, "max_tokens": 12, "temperature": 0} | fields
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return json.load(response)["choices"][0]["message"]


def check_model(page):
    page.wait_for(lambda: page.text("#model") != "ds4")
    assert page.text("#model") == "ds4-tiny", page.text("#model")


def check_turns(page):
    page.set(max_tokens=12, temperature=0, system="Speak.")
    page.ask(QUESTION)
    messages = [
        {"role": "system", "content": "Speak."},
        {"role": "user", "content": QUESTION},
    ]
    first = page.answer_of_api(messages, reasoning_effort="none")
    assert page.answers() == [first["content"]], page.answers()
    assert re.fullmatch(
        r"\d+ \+ 12 tokens, [\d.]+ s, [\d.]+ tokens/s, seed \d+", page.text("#state")
    ), page.text("#state")
    page.ask("And the earth?")
    messages += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "And the earth?"},
    ]
    second = page.answer_of_api(messages, reasoning_effort="none")
    assert page.answers()[1] == second["content"], page.answers()


def check_reload(page):
    before = page.texts("article > pre")
    page.browser.refresh()
    page.element("summary").click()
    assert page.texts("article > pre") == before and len(before) == 4, before
    page.set(max_tokens=12, temperature=0, system="Speak.")


def check_new_chat(page):
    page.element("#clear").click()
    assert page.texts("article") == [] and page.text("#state") == ""


def check_reasoning(page):
    page.set(effort="high")
    page.ask(QUESTION)
    messages = [
        {"role": "system", "content": "Speak."},
        {"role": "user", "content": QUESTION},
    ]
    expected = page.answer_of_api(messages, reasoning_effort="high")
    assert expected["reasoning_content"], expected
    shown = page.texts("article.assistant details pre")
    assert shown == [expected["reasoning_content"]], (shown, expected)
    assert page.element("article.assistant details").is_displayed()
    assert not page.element("article.assistant details pre").is_displayed(), "it is folded"
    page.set(effort="none")
    page.element("#clear").click()


def check_markup_is_text(page):
    page.element("#input").send_keys("<b>bold</b>", Keys.SHIFT + Keys.ENTER)
    page.element("#input").send_keys(Keys.NULL, "<script>document.title = 'no'</script>")
    page.ask("")
    assert page.texts("article.user > pre") == [
        "<b>bold</b>\n<script>document.title = 'no'</script>"
    ], page.texts("article.user > pre")
    assert page.browser.title == "ds4" and page.texts("article b") == []
    page.element("#clear").click()


def check_stop(page):
    page.set(max_tokens=4000)
    page.element("#input").send_keys(QUESTION, Keys.ENTER)
    page.wait_for(lambda: "".join(page.answers()))
    page.element("#stop").click()
    page.wait_for(page.is_idle)
    stopped = page.answers()
    assert len(stopped) == 1 and stopped[0] and page.errors() == [], stopped
    page.set(max_tokens=3)
    page.ask("And then?")
    assert page.answers()[0] == stopped[0] and page.answers()[1], page.answers()
    page.element("#clear").click()


def check_refused_request(page):
    page.set(max_tokens=0)
    page.ask(QUESTION)
    assert len(page.errors()) == 1 and "max_tokens" in page.errors()[0], page.errors()
    page.set(max_tokens=3)
    page.ask(QUESTION)
    assert len(page.errors()) == 1 and page.answers()[-1], page.answers()
    page.element("#clear").click()


def check_calls(browser, url):
    """Of a checkpoint whose next tokens are those of two calls."""
    page = Page(browser, url)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "required": ["city"],
        "properties": {"city": {"type": "string", "enum": ["Rome"]}},
        "additionalProperties": False}, "strict": True}}]
    page.browser.execute_script(
        "const real = window.fetch;"
        "window.fetch = (url, options) => {"
        "  if (!options?.body) return real(url, options);"
        "  const body = JSON.parse(options.body);"
        "  if (body.messages.length === 1) body.tool_choice = 'required';"
        "  return real(url, {...options, body: JSON.stringify(body)});"
        "};"
    )
    page.set(max_tokens=200, tools=json.dumps(tools))
    page.ask("How is it in Rome?")
    assert page.texts("pre.call") == ['weather({"city": "Rome"})'], page.texts("pre.call")
    assert "weather" in page.element("#input").get_property("placeholder")
    page.set(max_tokens=3)
    page.ask("Sunny.")
    assert page.texts("article.tool > pre") == ["Sunny."] and page.errors() == [], page.errors()
    assert len(page.texts("article.assistant")) == 2


def check_below_a_path(browser, url):
    with below(url, "/model") as address:
        for slash in ["", "/"]:
            page = Page(browser, address + slash)
            check_model(page)
            page.set(max_tokens=3)
            page.ask(QUESTION)
            assert page.answers()[-1] and page.errors() == [], page.errors()
            page.element("#clear").click()


def check_key(browser, url):
    page = Page(browser, url)
    page.set(max_tokens=3)
    page.ask(QUESTION)
    assert len(page.errors()) == 1 and "key" in page.errors()[0].lower(), page.errors()
    page.set(key=KEY)
    page.ask(QUESTION)
    assert len(page.errors()) == 1 and page.answers()[-1], page.answers()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="the program to run")
    server = parser.parse_args().server
    options = webdriver.ChromeOptions()
    # The sandbox of Chromium does not run as root.
    for option in ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage"]:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Selenium would look for a driver to download.
    driver = Service(shutil.which("chromedriver"))
    with webdriver.Chrome(options, driver) as browser:
        with serving(server) as url:
            page = Page(browser, url)
            for check in [
                check_model,
                check_turns,
                check_reload,
                check_new_chat,
                check_reasoning,
                check_markup_is_text,
                check_stop,
            ]:
                check(page)
                print("ok", check.__name__)
            # Those that follow are of refused requests, which the browser reports.
            log = [entry for entry in browser.get_log("browser") if entry["level"] != "DEBUG"]
            assert log == [], log
            check_refused_request(page)
            print("ok", check_refused_request.__name__)
            check_below_a_path(browser, url)
            print("ok", check_below_a_path.__name__)
        with tempfile.TemporaryDirectory() as tools:
            maker = Path(__file__).with_name("tool_checkpoint.py")
            subprocess.run([sys.executable, maker, tools], check=True)
            with serving(server, "--model", tools) as url:
                check_calls(browser, url)
                print("ok", check_calls.__name__)
        with serving(server, "--api-key", KEY) as url:
            check_key(browser, url)
            print("ok", check_key.__name__)


if __name__ == "__main__":
    main()
