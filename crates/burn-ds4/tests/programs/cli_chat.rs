//! The chat of `generate` at a terminal.

use rexpect::session::{PtySession, spawn_command};
use serde_json::{Value, json};

use crate::cli::program;
use crate::cli_serve::{PATIENCE, Server};
use crate::golden::root;

fn chat(arguments: &[&str]) -> PtySession {
    let mut command = program("generate");
    command.args(arguments).args(["--device", "flex"]);
    command.env("TERM", "xterm").current_dir(root());
    let patience = PATIENCE.as_millis() as u64;
    let mut session = spawn_command(command, Some(patience)).expect("a terminal");
    session
        .exp_string("Ctrl-D ends the chat]")
        .expect("a greeting");
    session
}

/// Says something once the program waits for it, and returns what follows up to `until`.
#[track_caller]
fn say(session: &mut PtySession, line: &str, until: &str) -> String {
    session.exp_string("> ").expect("a prompt");
    session.send_line(line).expect("it listens");
    // What is typed is echoed.
    session.exp_string(line).expect("an echo");
    let text = session.exp_string(until);
    text.unwrap_or_else(|error| panic!("{line:?}: {error}"))
}

#[test]
fn a_chat_answers_turn_after_turn_and_ends_at_the_end_of_input() {
    let mut session = chat(&["-n", "6", "--temp", "1"]);
    say(&mut session, "Who made the heaven?", "[6 tokens, ");
    say(&mut session, "/regenerate", "[6 tokens, ");
    say(&mut session, "/system Be brief.", "");
    say(
        &mut session,
        "And who the earth?",
        "as many tokens as wanted]",
    );
    say(
        &mut session,
        "/stats",
        "[4 messages, answers of 18 tokens in all]",
    );
    say(&mut session, "/think", "expected low, high, max or off");
    session.exp_string("> ").expect("a prompt");
    session.send_control('d').expect("it listens");
    session.exp_eof().expect("it ends");
}

#[test]
fn answers_with_exact_prefixes_are_those_of_fresh_runs() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("saved.json");
    let path = path.to_str().expect("a UTF-8 path");
    // The same drafts as those of the server, the same encoding, and chunks of the same length.
    let options = ["-m", "assets/ds4-tiny", "-n", "12", "--temp", "1.2"];
    let mut session = chat(&[&options[..], &["--seed", "7", "--exact-prefix"]].concat());
    for question in ["Who made the heaven?", "And who the earth?", "And the sea?"] {
        say(&mut session, question, " tokens, ");
    }
    say(&mut session, &format!("/save {path}"), "");
    say(&mut session, "/exit", "");
    session.exp_eof().expect("it ends");
    let saved = std::fs::read(path).expect("a conversation");
    let saved: Value = serde_json::from_slice(&saved).expect("JSON");
    let messages = saved["messages"].as_array().expect("messages");
    assert_eq!(messages.len(), 6, "{saved}");
    let server = Server::shared();
    for turn in [1, 3, 5] {
        let body = json!({
            "messages": messages[..turn], "max_tokens": 12, "temperature": 1.2, "seed": 7,
        });
        let answer = server.ask("/v1/chat/completions", &body);
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["content"], messages[turn]["content"], "{saved}");
    }
}

#[test]
fn an_interrupt_stops_an_answer_and_not_the_chat() {
    // A text that would take minutes.
    let mut session = chat(&["-n", "4000"]);
    session.exp_string("> ").expect("a prompt");
    session
        .send_line("Who made the heaven?")
        .expect("it listens");
    // Of the answer, not of the echo.
    session.exp_string("and the").expect("some words");
    session.send_control('c').expect("it listens");
    session
        .exp_string("; interrupted]")
        .expect("it has stopped");
    say(&mut session, "/stats", "[2 messages, answers of");
    session.exp_string("> ").expect("a prompt");
    session.send_control('c').expect("it listens");
    session
        .exp_string("Ctrl-D ends the chat]")
        .expect("it goes on");
    say(&mut session, "/exit", "");
    session.exp_eof().expect("it ends");
}
