use super::*;
use crate::generate::chat::{Completion, parse_completion};
use proptest::prelude::*;

const CALLS: &str = "r</think>Wait.\n\nNow:

<｜DSML｜tool_calls>
<｜DSML｜invoke name=\"weather\">
<｜DSML｜parameter name=\"city\" string=\"true\">Köln \"x\">
</｜DSML｜invoke>
2</｜DSML｜parameter>
<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name=\"now\">

</｜DSML｜invoke>
</｜DSML｜tool_calls>";

/// Everything that these pieces give.
fn split<'a>(thinking: bool, pieces: impl IntoIterator<Item = &'a str>) -> (Completion, bool) {
    let mut splitter = CompletionSplitter::new(thinking);
    let mut completion = Completion::default();
    for piece in pieces {
        completion.extend(splitter.push(piece));
    }
    completion.extend(splitter.finish());
    (completion, splitter.error().is_some())
}

fn completion(reasoning: &str, content: &str, calls: &[(&str, &str)]) -> Completion {
    let call = |(name, arguments): &(&str, &str)| ToolCall {
        id: String::new(),
        name: (*name).into(),
        arguments: (*arguments).into(),
    };
    Completion {
        reasoning: (!reasoning.is_empty()).then(|| reasoning.into()),
        content: content.into(),
        tool_calls: calls.iter().map(call).collect(),
    }
}

/// Thinking or not, a text, what it is split into, and whether it follows the encoding.
fn cases() -> Vec<(bool, String, Completion, bool)> {
    let case = |thinking, text: &str, parts, valid| (thinking, text.to_owned(), parts, valid);
    let block = |inner: &str| format!("a\n\n<｜DSML｜tool_calls>\n{inner}");
    let good = "<｜DSML｜invoke name=\"f\">\n\n</｜DSML｜invoke>\n";
    let f = ("f", "{}");
    let arguments = "{\"city\": \"Köln \\\"x\\\">\\n</｜DSML｜invoke>\\n2\", \"days\": 3}";
    let calls = [("weather", arguments), ("now", "{}")];
    vec![
        case(true, CALLS, completion("r", "Wait.\n\nNow:", &calls), true),
        case(false, "", completion("", "", &[]), true),
        case(
            false,
            "a\n\n<b>\n</i>",
            completion("", "a\n\n<b>\n</i>", &[]),
            true,
        ),
        case(
            true,
            "r\n\n<</think>\n\n",
            completion("r\n\n<", "\n\n", &[]),
            true,
        ),
        case(false, "a <think", completion("", "a <think", &[]), true),
        case(false, "a\n\n<", completion("", "a\n\n<", &[]), true),
        // From here on, texts leave the encoding.
        case(true, "no end", completion("no end", "", &[]), false),
        case(
            false,
            "a<think>b</think>c",
            completion("", "abc", &[]),
            false,
        ),
        case(
            true,
            "a<｜User｜>b</think>c",
            completion("ab", "c", &[]),
            false,
        ),
        case(
            false,
            "a\n\n<｜DSML｜tool_calls>",
            completion("", "a", &[]),
            false,
        ),
        case(
            false,
            "a\n<｜DSML｜tool_calls>\n",
            completion("", "a\n", &[]),
            false,
        ),
        case(
            false,
            "a</｜DSML｜invoke> b",
            completion("", "a", &[]),
            false,
        ),
        case(true, &block(good), completion("a", "", &[]), false),
        case(false, &block(good), completion("", "a", &[f]), false),
        case(
            false,
            &block(&format!("{good}text")),
            completion("", "a", &[f]),
            false,
        ),
        case(
            false,
            &block(&format!("{good}</｜DSML｜tool_calls>\n")),
            completion("", "a", &[f]),
            false,
        ),
        case(
            false,
            &block("<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"p\" string=\"no\">"),
            completion("", "a", &[]),
            false,
        ),
    ]
}

#[test]
fn a_whole_text_is_split_into_its_parts() {
    for (thinking, text, expected, valid) in cases() {
        let (parts, failed) = split(thinking, [text.as_str()]);
        assert_eq!(parts, expected, "{text:?}");
        assert_eq!(failed, !valid, "{text:?}");
        let parsed = parse_completion(&text, thinking).ok();
        let parsed = parsed.map(|completion| Completion {
            reasoning: completion.reasoning.filter(|text| !text.is_empty()),
            ..completion
        });
        assert_eq!(parsed, valid.then_some(expected), "{text:?}");
    }
}

#[test]
fn any_two_cuts_of_a_text_and_all_of_them_give_the_same_parts() {
    for (thinking, text, expected, valid) in cases() {
        let at = |index: &usize| text.is_char_boundary(*index);
        let boundaries: Vec<usize> = (0..=text.len()).filter(at).collect();
        for (index, first) in boundaries.iter().enumerate() {
            for second in &boundaries[index..] {
                let pieces = [&text[..*first], &text[*first..*second], &text[*second..]];
                let (parts, failed) = split(thinking, pieces);
                assert_eq!((parts, failed), (expected.clone(), !valid), "{pieces:?}");
            }
        }
        let characters = boundaries.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        let (parts, failed) = split(thinking, characters);
        assert_eq!((parts, failed), (expected, !valid), "{text:?}");
    }
}

#[test]
fn text_that_cannot_become_markup_is_not_withheld() {
    let mut splitter = CompletionSplitter::new(false);
    let content = |text: &str| CompletionPart::Content(text.into());
    assert_eq!(splitter.push("One.\n"), [content("One.")]);
    assert_eq!(splitter.push("\nTwo <"), [content("\n\nTwo ")]);
    assert_eq!(splitter.push("b"), [content("<b")]);
    assert_eq!(splitter.push("\n\n<"), []);
    assert!(splitter.is_content());
    assert_eq!(splitter.push("｜DSML｜tool_calls>\n"), []);
    assert!(!splitter.is_content());
}

#[test]
fn a_call_is_there_as_soon_as_it_is_complete() {
    let (first, rest) = CALLS.split_once("<｜DSML｜invoke name=\"now\"").unwrap();
    let mut splitter = CompletionSplitter::new(true);
    let parts = splitter.push(first);
    assert!(matches!(&parts[2..], [CompletionPart::Call(call)] if call.name == "weather"));
    assert_eq!(
        splitter
            .push(&format!("<｜DSML｜invoke name=\"now\"{rest}"))
            .len(),
        1
    );
}

proptest! {
    #[test]
    fn however_text_and_tags_follow_each_other_no_markup_gets_out(
        thinking: bool,
        words in prop::collection::vec(0..13usize, 0..12),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let tags = [
            "a", "\n", "<", CALLS_START, CALLS_END, INVOKE_START, NAME_END, INVOKE_END,
            PARAMETER_START, PARAMETER_END, THINK_START_TOKEN, THINK_END_TOKEN,
            "\" string=\"true\">",
        ];
        let text: String = words.iter().map(|word| tags[*word]).collect();
        let at = |index: &usize| text.is_char_boundary(*index);
        let boundaries: Vec<usize> = (0..=text.len()).filter(at).collect();
        let cuts = cuts.iter().map(|cut| *cut.get(&boundaries));
        let mut cuts: Vec<usize> = cuts.chain([0, text.len()]).collect();
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        let whole = split(thinking, [text.as_str()]);
        prop_assert_eq!(&split(thinking, pieces), &whole);
        let (parts, failed) = whole;
        prop_assert_eq!(parse_completion(&text, thinking).is_err(), failed);
        for text in [parts.content, parts.reasoning.unwrap_or_default()] {
            for token in [DSML_TOKEN, THINK_START_TOKEN, THINK_END_TOKEN] {
                prop_assert!(!text.contains(token), "{:?}", text);
            }
        }
    }
}
