//! Many clients at once:
//!
//! ```text
//! cargo build --release -p ds4-model --examples
//! cargo test --release -p ds4-model --test it cli_serve::load -- --ignored
//! ```

use serde_json::{Value, json};

use super::client::Server;
use super::{CHAT, chat, content, joined, merged};

const CLIENTS: usize = 200;
const REQUESTS: usize = 10;
/// Different requests.
const KINDS: usize = 16;

fn body(kind: usize) -> Value {
    let tokens = 1 + 3 * (kind % 8);
    chat(json!({"seed": kind, "temperature": 0.9, "max_tokens": tokens}))
}

#[test]
#[ignore = "takes minutes"]
fn two_thousand_requests_of_two_hundred_clients_are_all_answered_alike() {
    let server = Server::start(&["--lanes", "8", "--draft-tokens", "1", "--queue", "400"]);
    let expected: Vec<String> = (0..KINDS)
        .map(|kind| content(&server.ask(CHAT, &body(kind))))
        .collect();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (server, expected) = (&server, &expected);
            scope.spawn(move || {
                for request in 0..REQUESTS {
                    let kind = (client + request) % KINDS;
                    let text = match request % 3 {
                        0 => joined(&server.stream(CHAT, &body(kind)), 0, "content"),
                        _ => content(&server.ask(CHAT, &body(kind))),
                    };
                    assert_eq!(text, expected[kind], "client {client}, request {request}");
                    if request % 5 == 4 {
                        let long = merged(body(kind), json!({"max_tokens": 2000}));
                        let long = long.to_string();
                        drop(server.send("POST", CHAT, &[], long.as_bytes()));
                    }
                }
            });
        }
    });
    let completed = (KINDS + CLIENTS * REQUESTS) as f64;
    server.await_metric("ds4_requests_total{outcome=\"completed\"}", completed);
    server.await_metric("ds4_lanes_in_use", 0.0);
    server.await_metric("ds4_texts_waiting", 0.0);
}
