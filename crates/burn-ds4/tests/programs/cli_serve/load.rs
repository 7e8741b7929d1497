//! Many clients at once:
//!
//! ```text
//! cargo build --release -p ds4-model --examples
//! cargo test --release -p ds4-model --test it cli_serve::load -- --ignored
//! ```

use std::io::Read;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::Server;
use super::{CHAT, COMPLETIONS, chat, content, joined, merged};

const CLIENTS: usize = 200;
/// Of each client, in each of two rounds.
const REQUESTS: usize = 5;
/// Different requests.
const KINDS: usize = 16;

fn body(kind: usize) -> Value {
    let tokens = 1 + 3 * (kind % 8);
    chat(json!({"seed": kind, "temperature": 0.9, "max_tokens": tokens}))
}

/// Leaves before the answer has ended: at once, or after a while.
fn leave(server: &Server, kind: usize, random: &mut Random) {
    let long = json!({"max_tokens": 2000, "stream": random.below(2) == 0});
    let long = merged(body(kind), long).to_string();
    let mut stream = server.send("POST", CHAT, &[], long.as_bytes());
    if random.below(2) == 0 {
        let wait = Duration::from_millis(random.below(500) as u64 + 1);
        stream.set_read_timeout(Some(wait)).expect("a timeout");
        let _ = stream.read(&mut [0; 256]);
    }
}

/// A body that is cut or changed somewhere has an answer or an error that is the client's.
fn break_body(server: &Server, kind: usize, random: &mut Random) {
    // Of completions, whose answers are short whatever becomes of the fields.
    let body = json!({"prompt": "And God said,", "max_tokens": 4, "seed": kind});
    let mut bytes = body.to_string().into_bytes();
    let at = random.below(bytes.len());
    match random.below(2) {
        0 => bytes.truncate(at),
        _ => bytes[at] ^= 1 + random.below(255) as u8,
    }
    let mut response = server.open("POST", COMPLETIONS, &[], &bytes);
    let answer = response.json();
    match response.status {
        200 => assert!(answer["choices"].is_array(), "{answer}"),
        status => {
            assert!((400..500).contains(&status), "{status}: {answer}");
            assert!(answer["error"]["message"].is_string(), "{answer}");
        }
    }
}

fn round(server: &Server, expected: &[String], number: usize) {
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            scope.spawn(move || {
                let mut random = Random((2 * client + number) as u64);
                for request in 0..REQUESTS {
                    let kind = random.below(KINDS);
                    let text = match random.below(3) {
                        0 => joined(&server.stream(CHAT, &body(kind)), 0, "content"),
                        _ => content(&server.ask(CHAT, &body(kind))),
                    };
                    assert_eq!(text, expected[kind], "client {client}, request {request}");
                    match random.below(8) {
                        0 => leave(server, kind, &mut random),
                        1 => break_body(server, kind, &mut random),
                        _ => {}
                    }
                }
            });
        }
    });
    server.await_metric("ds4_lanes_in_use", 0.0);
    server.await_metric("ds4_texts_waiting", 0.0);
}

#[test]
#[ignore = "takes minutes"]
fn two_thousand_requests_of_two_hundred_clients_are_all_answered_alike() {
    let server = Server::start(&["--lanes", "8", "--draft-tokens", "1", "--queue", "500"]);
    let expected: Vec<String> = (0..KINDS)
        .map(|kind| content(&server.ask(CHAT, &body(kind))))
        .collect();
    let memory = [0, 1].map(|number| {
        round(&server, &expected, number);
        server.memory()
    });
    let completed = server.metric("ds4_requests_total{outcome=\"completed\"}");
    assert!(completed >= (KINDS + 2 * CLIENTS * REQUESTS) as f64);
    println!("bytes of memory after each round: {memory:?}");
    if let [Some(before), Some(after)] = memory {
        assert!(after <= before + before / 20, "{before} grew to {after}");
    }
    for outcome in ["invalid", "disconnected"] {
        let count = server.metric(&format!("ds4_requests_total{{outcome=\"{outcome}\"}}"));
        assert!(count > 0.0, "{outcome}");
    }
    for outcome in ["failed", "timeout", "rejected", "unavailable"] {
        let count = server.metric(&format!("ds4_requests_total{{outcome=\"{outcome}\"}}"));
        assert_eq!(count, 0.0, "{outcome}");
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}
