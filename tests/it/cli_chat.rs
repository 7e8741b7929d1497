//! The chat of `generate` at a terminal.

use std::process::Command;

use rexpect::session::{PtySession, spawn_command};

use crate::cli::example;
use crate::golden::root;

/// Of the longest wait for anything, in milliseconds.
const PATIENCE: u64 = 120_000;

fn chat(arguments: &[&str]) -> PtySession {
    let mut command = Command::new(example("generate"));
    command.args(arguments).args(["--device", "flex"]);
    command.env("TERM", "xterm").current_dir(root());
    let mut session = spawn_command(command, Some(PATIENCE)).expect("a terminal");
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
