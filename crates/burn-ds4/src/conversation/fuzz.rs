//! The fuzz target of answers, and its test.

use std::sync::OnceLock;

use deepseek_recipe::stream::{
    InferenceFinishReason, OutputChunk, ParsingOptions, ThinkingInitialStage,
};
use ds4_model::generate::TextTokenizer;

use super::calls::MARK;
use super::parser::AnswerParser;
use crate::shared::shipped_checkpoint;

/// Control tokens that texts are divided at.
const CONTROLS: [&str; 5] = [
    "</think>",
    MARK,
    "<think>",
    "<｜User｜>",
    "<｜end▁of▁sentence｜>",
];

/// A text as tokens divide it: control tokens by themselves, and the rest at these places, too.
fn pieces<'a>(text: &'a str, cuts: &[usize]) -> Vec<(&'a str, bool)> {
    let mut pieces = Vec::new();
    let mut from = 0;
    while from < text.len() {
        let found = CONTROLS
            .iter()
            .filter_map(|token| Some((text[from..].find(token)?, *token)));
        let (at, token) = found.min().unwrap_or((text.len() - from, ""));
        let mut start = from;
        for cut in cuts
            .iter()
            .filter(|cut| (from + 1..from + at).contains(cut))
        {
            pieces.push((&text[start..*cut], false));
            start = *cut;
        }
        if start < from + at {
            pieces.push((&text[start..from + at], false));
        }
        if !token.is_empty() {
            pieces.push((token, true));
        }
        from += at + token.len();
    }
    pieces
}

/// Reasoning, content, and calls with their arguments.
type Parts = (String, String, Vec<(String, String)>);

fn parsed(pieces: &[(&str, bool)], thinking: bool, tools: bool) -> Parts {
    static TOKENIZER: OnceLock<TextTokenizer> = OnceLock::new();
    let open = || TextTokenizer::from_dir(shipped_checkpoint()).expect("an asset");
    let options = ParsingOptions {
        parse_tool_calls: tools,
        thinking_initial_stage: thinking.then_some(ThinkingInitialStage::ReasoningStart),
        ..ParsingOptions::default()
    };
    let mut parser = AnswerParser::new(TOKENIZER.get_or_init(open), options);
    let mut parts = Parts::default();
    let mut chunks = Vec::new();
    for (text, is_control) in pieces {
        match is_control {
            true => parser.added(text, None),
            false => parser.plain((*text).into(), None, None),
        }
        chunks.extend(parser.found());
    }
    chunks.extend(parser.finish(InferenceFinishReason::Stop));
    assert!(matches!(chunks.last(), Some(OutputChunk::Finish { .. })));
    for chunk in chunks {
        match chunk {
            OutputChunk::Reasoning { content, .. } => parts.0 += &content,
            OutputChunk::Content { content, .. } => parts.1 += &content,
            OutputChunk::ToolCallNamed { tool_name } => parts.2.push((tool_name, String::new())),
            OutputChunk::ToolCallArgumentsDelta { arguments } => {
                parts.2.last_mut().expect("a call is named first").1 += &arguments;
            }
            _ => (),
        }
    }
    parts
}

/// The first byte is the mode, the next two are where the text is divided, the rest is the text.
pub fn answer(data: &[u8]) {
    let Some(([mode, cuts @ ..], text)) = data.split_first_chunk::<3>() else {
        return;
    };
    let (thinking, tools) = (mode % 2 == 1, mode % 4 < 2);
    let text = String::from_utf8_lossy(text);
    let cut = |cut: &u8| text.floor_char_boundary(text.len() * usize::from(*cut) / 255);
    let mut cuts = [&cuts[0], &cuts[1]].map(cut);
    cuts.sort_unstable();
    let whole = parsed(&pieces(&text, &[]), thinking, tools);
    assert_eq!(
        parsed(&pieces(&text, &cuts), thinking, tools),
        whole,
        "{text:?}, {cuts:?}"
    );
    if !tools {
        assert!(whole.2.is_empty(), "{text:?}");
    }
}

#[cfg(test)]
#[test]
fn answers() {
    ds4_fuzz_driver::drive("chat", 1500, answer);
}
