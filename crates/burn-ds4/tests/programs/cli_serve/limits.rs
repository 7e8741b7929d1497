//! Keys, queues, clients that leave, and the end of the server.

#[cfg(unix)]
use std::fs::File;

use serde_json::{Value, json};

use super::client::{Response, Server};
use super::{CHAT, chat, merged};
#[cfg(unix)]
use crate::cli::golden_text;
#[cfg(unix)]
use crate::golden::copy;

/// A stream that goes on for so many tokens.
fn long(tokens: usize) -> Value {
    // The end-of-sequence token is forbidden.
    let bias = json!({"logit_bias": {"1": -100}, "max_tokens": tokens});
    merged(chat(bias), json!({"stream": true}))
}

/// Reads a stream up to its first text.
fn begun(server: &Server, body: &Value) -> Response {
    let mut response = server.post(CHAT, body);
    assert_eq!(response.status, 200);
    let mut text = Vec::new();
    while !String::from_utf8_lossy(&text).contains("\"delta\":{\"content\":\"") {
        text = response.chunk();
        assert!(!text.is_empty(), "the stream has ended");
        // The first piece has the role, and no text.
        let role = String::from_utf8_lossy(&text).contains("\"role\"");
        if role {
            text.clear();
        }
    }
    response
}

#[test]
fn only_who_has_the_key_gets_in() {
    let server = Server::start(&["--api-key", "secret", "--cors", "http://page.test"]);
    let body = chat(json!({"max_tokens": 1})).to_string();
    let status = |path: &str, key: &str| {
        let method = if path == CHAT { "POST" } else { "GET" };
        let headers = [("authorization", key)];
        let mut response = server.open(method, path, &headers, body.as_bytes());
        if response.status == 401 {
            assert_eq!(response.header("www-authenticate"), Some("Bearer"));
            assert_eq!(response.json()["error"]["type"], "authentication_error");
        }
        response.status
    };
    for path in [CHAT, "/v1/models", "/metrics"] {
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer secre",
            "Bearer secrets",
            "secret",
        ] {
            assert_eq!(status(path, wrong), 401, "{path} {wrong:?}");
        }
        assert_eq!(status(path, "Bearer secret"), 200, "{path}");
    }
    assert_eq!(status("/health", ""), 200);

    let asks = [("access-control-request-method", "POST")];
    let preflight = server.open("OPTIONS", CHAT, &asks, b"");
    assert_eq!(preflight.status, 204);
    let origin = preflight.header("access-control-allow-origin");
    assert_eq!(origin, Some("http://page.test"));
    let allowed = preflight.header("access-control-allow-headers");
    assert_eq!(allowed, Some("authorization, content-type"));
    // OpenAI's client asks for headers of its own.
    let wanted = "authorization,content-type,x-stainless-os,x-stainless-retry-count";
    let asks = [asks[0], ("access-control-request-headers", wanted)];
    let preflight = server.open("OPTIONS", CHAT, &asks, b"");
    let allowed = preflight.header("access-control-allow-headers");
    assert_eq!((preflight.status, allowed), (204, Some(wanted)));
}

#[test]
fn a_key_of_the_environment_counts_unless_an_option_has_another() {
    for (options, right, wrong) in [
        (&[][..], "Bearer secret", "Bearer other"),
        (&["--api-key", "other"], "Bearer other", "Bearer secret"),
    ] {
        let server = Server::start_with_key(options, "secret");
        for (key, status) in [(right, 200), (wrong, 401)] {
            let response = server.open("GET", "/v1/models", &[("authorization", key)], b"");
            assert_eq!(response.status, status, "{options:?} {key}");
        }
    }
}

#[test]
fn without_the_option_no_page_of_another_origin_gets_in() {
    let server = Server::shared();
    let asks = [
        ("origin", "http://page.test"),
        ("access-control-request-method", "POST"),
    ];
    let preflight = server.open("OPTIONS", CHAT, &asks, b"");
    assert_eq!(preflight.status, 405);
    assert_eq!(preflight.header("access-control-allow-origin"), None);
}

#[test]
fn a_full_queue_refuses_and_a_client_that_leaves_frees_its_lane() {
    let server = Server::start(&["--lanes", "1", "--queue", "1"]);
    let leaving = "ds4_requests_total{outcome=\"disconnected\"}";
    let first = begun(&server, &long(4000));
    // It waits itself until its prompt is processed.
    server.await_metric("ds4_lanes_in_use", 1.0);
    std::thread::scope(|scope| {
        let second = scope.spawn(|| server.ask(CHAT, &chat(json!({"max_tokens": 2}))));
        server.await_metric("ds4_texts_waiting", 1.0);
        let mut refused = server.post(CHAT, &chat(json!({})));
        assert_eq!(refused.status, 429);
        assert_eq!(refused.header("retry-after"), Some("1"));
        assert_eq!(refused.json()["error"]["code"], "queue_full");
        drop(first);
        let second = second.join().unwrap();
        assert_eq!(second["usage"]["completion_tokens"], 2);
    });
    server.await_metric(leaving, 1.0);
    assert!(server.metric("ds4_generated_tokens_total") < 4000.0);

    // The same without a stream, which nobody reads either.
    let mut body = long(4000);
    body["stream"] = json!(false);
    let waiting = server.send("POST", CHAT, &[], body.to_string().as_bytes());
    server.await_metric("ds4_lanes_in_use", 1.0);
    drop(waiting);
    server.await_metric("ds4_lanes_in_use", 0.0);
    server.await_metric(leaving, 2.0);
    assert!(server.metric("ds4_generated_tokens_total") < 8000.0);
}

#[test]
fn an_answer_that_takes_too_long_is_given_up() {
    let server = Server::start(&["--timeout", "1"]);
    // More tokens than a second has time for, several times over.
    let mut body = merged(long(4000), json!({"n": 8}));
    let mut stream = server.post(CHAT, &body);
    let events = stream.events();
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "timeout", "{last}");
    body["stream"] = json!(false);
    let mut whole = server.post(CHAT, &body);
    assert_eq!(
        (whole.status, &whole.json()["error"]["code"]),
        (504, &json!("timeout"))
    );
    server.await_metric("ds4_lanes_in_use", 0.0);
}

#[test]
fn an_answer_that_nobody_reads_is_given_up_all_the_same() {
    let server = Server::start(&["--timeout", "4"]);
    // More than the system keeps for a client, so that the server cannot write on.
    let wide = json!({"n": 8, "logprobs": true, "top_logprobs": 20, "stream": true});
    let body = merged(long(4000), wide).to_string();
    let unread = server.send("POST", CHAT, &[], body.as_bytes());
    server.await_metric("ds4_lanes_in_use", 8.0);
    server.await_metric("ds4_lanes_in_use", 0.0);
    // Others go on.
    let next = server.ask(CHAT, &chat(json!({"max_tokens": 2})));
    assert_eq!(next["usage"]["completion_tokens"], 2);
    // So much later, the connection ends as well.
    server.await_metric("ds4_requests_total{outcome=\"timeout\"}", 1.0);
    drop(unread);
}

#[cfg(unix)]
#[test]
fn a_server_that_is_stopped_finishes_what_it_has_begun() {
    let mut server = Server::start(&[]);
    let usage = json!({"stream_options": {"include_usage": true}});
    // While it runs, the server does not end.
    let longest = begun(&server, &long(4000));
    let mut running = begun(&server, &merged(long(200), usage));
    server.signal("TERM");
    while server.get("/health").status == 200 {}
    let mut refused = server.post(CHAT, &chat(json!({})));
    let code = refused.json()["error"]["code"].clone();
    assert_eq!((refused.status, code), (503, json!("stopping")));
    drop(longest);
    let mut events = running.events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["usage"]["completion_tokens"], 200);
    assert_eq!(server.wait().code(), Some(0));
    let log = server.log();
    let lines = log
        .lines()
        .filter(|line| line.contains("path=/v1/chat/completions"));
    let outcomes = lines.filter_map(|line| line.split("outcome=\"").nth(1)?.split('"').next());
    let mut outcomes: Vec<&str> = outcomes.collect();
    outcomes.sort_unstable();
    assert_eq!(
        outcomes,
        ["completed", "disconnected", "unavailable"],
        "{log}"
    );
    assert!(log.contains("place=flex in f32"), "{log}");
}

#[cfg(unix)]
#[test]
fn a_second_signal_ends_the_server_at_once() {
    let mut server = Server::start(&[]);
    let running = begun(&server, &long(4000));
    server.signal("INT");
    while server.get("/health").status == 200 {}
    server.signal("INT");
    assert_eq!(server.wait().code(), Some(1));
    drop(running);
    let log = server.log();
    assert!(log.contains("error: stopped by a second signal\n"), "{log}");
}

// Windows refuses to shorten a file that is mapped.
#[cfg(unix)]
#[test]
fn a_server_needs_its_files_only_to_begin() {
    let dir = copy(&[]);
    let path = dir.path().to_str().expect("a UTF-8 path");
    let server = Server::start(&["--model", path, "--draft-tokens", "1"]);
    for entry in std::fs::read_dir(dir.path()).expect("a directory") {
        let file = File::options()
            .write(true)
            .open(entry.expect("a file").path());
        let emptied = file.and_then(|file| file.set_len(0));
        emptied.expect("the directory is writable");
    }
    let (prompt, expected) = golden_text("short", 24);
    let body = json!({"prompt": prompt, "max_tokens": 24});
    let answer = server.ask("/v1/completions", &body);
    assert_eq!(answer["choices"][0]["text"], expected);
}
