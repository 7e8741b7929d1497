//! The chat with a model that says what it was asked.

use std::collections::VecDeque;

use crate::generate::Said;
use serde_json::{Value, json};

use super::*;

/// What the model was asked.
#[derive(Clone, Debug, PartialEq)]
struct Asked {
    messages: Vec<InputMessage>,
    thinking: Option<Effort>,
    attempt: u64,
}

/// Says prepared answers.
#[derive(Default)]
struct Script {
    asked: Vec<Asked>,
    answers: VecDeque<Result<Answer, Failure>>,
}

impl Answers for Script {
    fn answer(
        &mut self,
        messages: &[InputMessage],
        effort: Option<Effort>,
        attempt: u64,
        reader: &mut dyn FnMut(&Part) -> io::Result<()>,
    ) -> Result<Answer, Failure> {
        self.asked.push(Asked {
            messages: messages.to_vec(),
            thinking: effort,
            attempt,
        });
        let answer = self.answers.pop_front().expect("an answer is prepared")?;
        let Said { reasoning, content } = &answer.said;
        let reasoning = reasoning.clone().map(Part::Reasoning);
        let parts = reasoning
            .into_iter()
            .chain([Part::Content(content.clone())]);
        for part in parts {
            reader(&part).expect("memory");
        }
        Ok(answer)
    }
}

impl Lines for VecDeque<Input> {
    fn read(&mut self) -> Result<Input, Box<dyn Error>> {
        Ok(self.pop_front().unwrap_or(Input::End))
    }
}

fn answered(content: &str, finish: Finish) -> Result<Answer, Failure> {
    let mut answer = Answer::empty(7);
    answer.said.content = content.into();
    answer.finish = finish;
    answer.figures.tokens = 5;
    answer.figures.seconds = 2.0;
    Ok(answer)
}

fn said(content: &str) -> Result<Answer, Failure> {
    answered(content, Finish::EndOfSequence)
}

/// What the model is asked and what is written, for these lines.
fn chat(lines: &[&str], answers: Vec<Result<Answer, Failure>>) -> (Vec<Asked>, String) {
    let mut script = Script {
        answers: answers.into(),
        ..Script::default()
    };
    let mut lines: VecDeque<Input> = lines
        .iter()
        .map(|line| Input::Line((*line).into()))
        .collect();
    let mut out = Vec::new();
    let mut chat = Chat::new(&mut script, &mut out, None);
    chat.run(&mut lines).expect("nothing fails");
    assert!(script.answers.is_empty(), "answers that nobody asked for");
    (script.asked, String::from_utf8(out).expect("text"))
}

fn assistant(content: &str) -> InputMessage {
    super::assistant(content.into(), None)
}

fn asked(messages: &[InputMessage]) -> Asked {
    Asked {
        messages: messages.to_vec(),
        thinking: None,
        attempt: 0,
    }
}

#[test]
fn every_turn_has_the_turns_before_it_until_a_reset() {
    let lines = [
        "/system Be brief.",
        "a",
        "",
        "b",
        "/reset",
        "c",
        "/system",
        "d",
    ];
    let (all, text) = chat(&lines, vec![said("A"), said("B"), said("C"), said("D")]);
    let rule = || system("Be brief.");
    assert_eq!(
        all,
        [
            asked(&[rule(), user("a")]),
            asked(&[rule(), user("a"), assistant("A"), user("b")]),
            asked(&[rule(), user("c")]),
            asked(&[user("c"), assistant("C"), user("d")]),
        ]
    );
    assert!(
        text.contains("\nA\n[5 tokens, 2.0 tokens/s; the text has ended]\n"),
        "{text}"
    );
}

#[test]
fn a_last_answer_is_made_anew_with_another_seed() {
    let lines = ["/regenerate", "a", "/regenerate", "/regenerate", "b"];
    let answers = ["A", "A2", "A3", "B"].map(said);
    let (all, text) = chat(&lines, answers.into());
    let attempts: Vec<u64> = all.iter().map(|asked| asked.attempt).collect();
    assert_eq!(attempts, [0, 1, 2, 0]);
    assert_eq!(all[2].messages, [user("a")]);
    let expected = [user("a"), assistant("A3"), user("b")];
    assert_eq!(all[3].messages, expected);
    assert!(text.contains("error: there is no answer yet\n"), "{text}");
}

#[test]
fn the_model_thinks_as_much_as_it_is_told_to() {
    let lines = ["a", "/think high", "b", "/think off", "c", "/think more"];
    let mut thought = said("B");
    if let Ok(answer) = &mut thought {
        answer.said.reasoning = Some("why".into());
    }
    let (all, text) = chat(&lines, vec![said("A"), thought, said("C")]);
    let thinking: Vec<_> = all.iter().map(|asked| asked.thinking).collect();
    assert_eq!(thinking, [None, Some(Effort::High), None]);
    assert!(text.contains("\nwhy\n\nB\n"), "{text}");
    assert!(text.contains("error: /think is \"more\""), "{text}");
}

#[test]
fn what_was_said_before_an_interrupt_stays_and_nothing_is_dropped_with_its_message() {
    let answers = vec![
        answered("half", Finish::Interrupted),
        answered("", Finish::Interrupted),
        said("C"),
        answered("", Finish::Interrupted),
        said("D"),
    ];
    let (all, text) = chat(&["a", "b", "c", "/regenerate", "d"], answers);
    let before = [user("a"), assistant("half"), user("c")];
    assert_eq!(all[2].messages, before);
    // The answer that was to be replaced is still there.
    let expected = [&before[..], &[assistant("C"), user("d")]].concat();
    assert_eq!(all[4].messages, expected);
    assert_eq!(
        text.matches("; interrupted, nothing changes]").count(),
        2,
        "{text}"
    );
}

#[test]
fn a_message_that_is_refused_is_dropped_and_the_chat_goes_on() {
    let refused = Err(Failure::Refused("the prompt has 9 tokens".into()));
    let (all, text) = chat(&["a", "b"], vec![refused, said("B")]);
    assert_eq!(all[1].messages, [user("b")]);
    assert!(
        text.contains("\nerror: the prompt has 9 tokens\nB\n"),
        "{text}"
    );
}

#[test]
fn a_failure_of_the_device_ends_the_chat() {
    let mut script = Script::default();
    script.answers.push_back(Err(Failure::Lost("gone".into())));
    let mut lines: VecDeque<Input> = ["a", "b"].map(|line| Input::Line(line.into())).into();
    let mut chat = Chat::new(&mut script, Vec::new(), None);
    let error = chat.run(&mut lines).expect_err("the device has failed");
    assert_eq!(error.to_string(), "gone");
    assert_eq!(lines.len(), 1);
}

#[test]
fn an_interrupt_at_the_prompt_ends_nothing_and_the_end_of_input_does() {
    let mut script = Script::default();
    script.answers.push_back(said("A"));
    let mut lines: VecDeque<Input> = [
        Input::Interrupted,
        Input::Line("a".into()),
        Input::End,
        Input::Line("b".into()),
    ]
    .into();
    let mut out = Vec::new();
    let mut chat = Chat::new(&mut script, &mut out, None);
    chat.run(&mut lines).expect("nothing fails");
    assert_eq!((script.asked.len(), lines.len()), (1, 1));
    let text = String::from_utf8(out).expect("text");
    assert!(text.contains("[Ctrl-D ends the chat]\nA\n"), "{text}");
}

#[test]
fn a_conversation_is_saved_to_a_new_file_only() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("talk.json");
    let save = format!("/save {}", path.display());
    let lines = [
        "/system s",
        "a",
        &save,
        "b",
        &save,
        "/save no/such/dir/talk",
    ];
    let (_, text) = chat(&lines, vec![said("A"), said("B")]);
    let saved = std::fs::read_to_string(&path).expect("it was saved");
    let saved: Value = serde_json::from_str(&saved).expect("JSON");
    let expected = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "A"},
    ]);
    assert_eq!(saved["messages"], expected);
    assert!(
        text.contains(&format!("[saved to {}]\n", path.display())),
        "{text}"
    );
    assert!(
        text.contains(&format!("error: {}: ", path.display())),
        "{text}"
    );
    assert!(text.contains("error: no/such/dir/talk: "), "{text}");
}

#[test]
fn figures_are_those_of_the_last_answer_and_of_the_conversation() {
    let lines = ["/stats", "a", "b", "/stats", "/reset", "/stats"];
    let (_, text) = chat(&lines, vec![said("A"), said("B")]);
    let expected = "[last answer: prompt 7 tokens in 0.00 s, 5 tokens, 2.0 tokens/s]\n\
                    [4 messages, answers of 10 tokens in all]\n";
    assert!(text.contains(expected), "{text}");
    assert_eq!(
        text.matches("[nothing has been answered yet]").count(),
        2,
        "{text}"
    );
}

#[test]
fn an_answer_leaves_most_of_the_context_to_others() {
    for (context, tokens) in [(2, 1), (4096, 1024), (1 << 20, 4096)] {
        assert_eq!(default_tokens(context), tokens);
    }
}
