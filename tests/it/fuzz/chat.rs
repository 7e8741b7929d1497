//! What a model says, and what it is told.

use ds4_model::generate::chat::{
    ChatOptions, Completion, CompletionSplitter, Message, Tool, parse_completion, render_chat,
};
use serde_json::Value;

/// A text in pieces, and whether it follows the encoding.
fn split(thinking: bool, pieces: &[&str]) -> (Completion, bool) {
    let mut splitter = CompletionSplitter::new(thinking);
    let mut completion = Completion {
        reasoning: thinking.then(String::new),
        ..Completion::default()
    };
    for piece in pieces {
        completion.extend(splitter.push(piece));
    }
    completion.extend(splitter.finish());
    (completion, splitter.error().is_none())
}

/// The first byte is the mode, the next two are where the text is divided, the rest is the text.
pub fn chat(data: &[u8]) {
    let Some(([mode, cuts @ ..], text)) = data.split_first_chunk::<3>() else {
        return;
    };
    let (thinking, text) = (mode % 2 == 1, String::from_utf8_lossy(text));
    let parsed = parse_completion(&text, thinking);
    let ended = text.trim_end_matches("<｜end▁of▁sentence｜>");
    let cut = |cut: &u8| ended.floor_char_boundary(ended.len() * usize::from(*cut) / 255);
    let [first, last] = {
        let mut cuts = [&cuts[0], &cuts[1]].map(cut);
        cuts.sort_unstable();
        cuts
    };
    let whole = split(thinking, &[ended]);
    let pieces = [&ended[..first], &ended[first..last], &ended[last..]];
    assert_eq!(split(thinking, &pieces), whole, "{pieces:?}");
    let _ = Tool::from_json(&text).map(|tool| {
        let system = Message::System {
            content: String::new(),
            tools: vec![tool],
            response_format: Some(text.to_string()),
        };
        let prompt = render_chat(&[system, Message::user("u")], &ChatOptions::default());
        prompt.expect("JSON").text()
    });
    let Ok(completion) = parsed else {
        return;
    };
    assert_eq!((&completion, true), (&whole.0, whole.1), "{text:?}");
    let again = parse_completion(&rendered(&completion, thinking), thinking);
    let again = again.expect("it was rendered");
    let parts = |completion: &Completion| {
        let names = completion.tool_calls.iter().map(|call| call.name.clone());
        let names: Vec<String> = names.collect();
        (
            completion.reasoning.clone(),
            completion.content.clone(),
            names,
        )
    };
    assert_eq!(parts(&again), parts(&completion));
    for (again, call) in again.tool_calls.iter().zip(&completion.tool_calls) {
        let [again, given] = [again, call].map(|call| {
            let arguments = serde_json::from_str::<Value>(&call.arguments);
            arguments.expect("JSON")
        });
        assert_eq!(again, given, "{call:?}");
    }
}

/// The text of a completion, as the turn of a conversation has it.
fn rendered(completion: &Completion, thinking: bool) -> String {
    let options = ChatOptions {
        thinking,
        ..ChatOptions::default()
    };
    let user = || Message::user("u");
    let asked = render_chat(&[user()], &options).expect("a conversation");
    let answered = [user(), completion.clone().into()];
    let answered = render_chat(&answered, &options).expect("a conversation");
    let text = answered.text();
    let rest = text.strip_prefix(&asked.text());
    rest.expect("the answer follows the question").to_owned()
}
