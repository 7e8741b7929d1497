//! From the tokens of an answer to its text, while they arrive.

use ds4_model::generate::{
    CompletionPart, CompletionSplitter, DecodeStream, GenerateError, SpecialTokens, StopStrings,
    TextTokenizer,
};

/// How an answer is taken apart.
#[derive(Clone, Copy, Debug)]
pub enum Split {
    /// All of it is content.
    Content,
    /// It is reasoning up to this token, and then content.
    Reasoning {
        /// The token, which neither has.
        end: u32,
    },
    /// It follows the chat encoding.
    Chat {
        /// Whether it begins with reasoning.
        thinking: bool,
    },
}

/// The text of an answer.
#[derive(Debug)]
pub struct AnswerText<'a> {
    decoder: DecodeStream<'a>,
    split: Split,
    /// Of an answer that follows the chat encoding.
    splitter: Option<CompletionSplitter>,
    stops: StopStrings,
    /// Characters decoded.
    pub characters: usize,
}

impl<'a> AnswerText<'a> {
    /// The text that follows a prompt.
    pub fn new(
        tokenizer: &'a TextTokenizer,
        split: Split,
        stops: &[String],
    ) -> Result<Self, GenerateError> {
        let thinking = match split {
            Split::Chat { thinking } => Some(thinking),
            _ => None,
        };
        // The splitter knows what to do with special tokens; others have none.
        let special = match thinking {
            Some(_) => SpecialTokens::Keep,
            None => SpecialTokens::Skip,
        };
        Ok(Self {
            decoder: tokenizer.decode_stream(special),
            split,
            splitter: thinking.map(CompletionSplitter::new),
            stops: StopStrings::new(stops)?,
            characters: 0,
        })
    }

    /// Takes the next token.
    pub fn push(&mut self, id: u32) -> Result<Vec<CompletionPart>, GenerateError> {
        let text = self.decoder.push(id)?;
        match self.split {
            Split::Reasoning { end } if id == end => {
                self.split = Split::Content;
                Ok(Vec::new())
            }
            _ => Ok(self.take(text)),
        }
    }

    /// What was withheld, once no token follows.
    pub fn finish(&mut self) -> Vec<CompletionPart> {
        let text = self.decoder.finish();
        let mut parts = self.take(text);
        let rest = self.splitter.iter_mut();
        let rest = rest.flat_map(CompletionSplitter::finish).collect();
        parts.extend(self.until_stop(rest));
        parts.extend(content(self.stops.finish()));
        parts
    }

    /// Whether a stop string has ended the content.
    pub fn is_stopped(&self) -> bool {
        self.stops.stopped()
    }

    /// Whether the next text is content, as far as that is known.
    pub fn is_content(&self) -> bool {
        let splitter = self.splitter.as_ref();
        let is_content = !matches!(self.split, Split::Reasoning { .. });
        splitter.map_or(is_content, CompletionSplitter::is_content)
    }

    /// How the text has left the encoding of conversations, if it has.
    pub fn error(&self) -> Option<GenerateError> {
        self.splitter.as_ref().and_then(CompletionSplitter::error)
    }

    fn take(&mut self, text: String) -> Vec<CompletionPart> {
        self.characters += text.chars().count();
        let parts = match (&mut self.splitter, self.split) {
            (Some(splitter), _) => splitter.push(&text),
            // A part of a character has no text yet.
            (None, Split::Reasoning { .. }) if text.is_empty() => Vec::new(),
            (None, Split::Reasoning { .. }) => vec![CompletionPart::Reasoning(text)],
            (None, _) => vec![CompletionPart::Content(text)],
        };
        self.until_stop(parts)
    }

    /// Parts up to a stop string in the content.
    fn until_stop(&mut self, parts: Vec<CompletionPart>) -> Vec<CompletionPart> {
        let mut before = Vec::new();
        for part in parts {
            match part {
                _ if self.stops.stopped() => (),
                CompletionPart::Content(text) => {
                    before.extend(content(self.stops.push(&text).emit));
                }
                CompletionPart::Call(call) => {
                    // It ends the content, of which some may be withheld.
                    before.extend(content(self.stops.finish()));
                    if !self.stops.stopped() {
                        before.push(CompletionPart::Call(call));
                    }
                }
                reasoning => before.push(reasoning),
            }
        }
        before
    }
}

fn content(text: String) -> Option<CompletionPart> {
    (!text.is_empty()).then_some(CompletionPart::Content(text))
}

#[cfg(test)]
mod tests {
    use ds4_model::generate::Completion;

    use super::*;
    use crate::shared::shipped_checkpoint;

    /// What becomes of a text, and whether it was stopped.
    fn answer(text: &str, split: Split, stops: &[&str]) -> (Completion, bool) {
        let tokenizer = TextTokenizer::from_dir(shipped_checkpoint()).expect("an asset");
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).into()).collect();
        let mut answer = AnswerText::new(&tokenizer, split, &stops).expect("stop strings");
        let mut completion = Completion::default();
        for id in tokenizer.encode_plain(text).expect("text") {
            completion.extend(answer.push(id).expect("a known id"));
        }
        completion.extend(answer.finish());
        assert_eq!(answer.characters, text.chars().count());
        (completion, answer.is_stopped())
    }

    #[test]
    fn a_stop_string_ends_the_content_and_calls_that_follow_it() {
        let call = "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\n</｜DSML｜invoke>\n\
                    </｜DSML｜tool_calls>";
        // Of "abc", the end is a stop string, and all of it may be the beginning of one.
        for (stops, content, calls, stopped) in [
            (&["abcd", "bc"][..], "a", 0, true),
            (&["abcd"], "abc", 1, false),
            (&[], "abc", 1, false),
        ] {
            let (completion, is_stopped) = answer(
                &format!("abc{call}"),
                Split::Chat { thinking: false },
                stops,
            );
            let found = (&*completion.content, completion.tool_calls.len());
            assert_eq!(
                (found, is_stopped),
                ((content, calls), stopped),
                "{stops:?}"
            );
        }
    }

    #[test]
    fn without_a_conversation_all_text_is_content() {
        let (completion, _) = answer("a</think>b", Split::Content, &[]);
        let content = (completion.content.as_str(), completion.reasoning);
        assert_eq!(content, ("a</think>b", None));
        let (completion, stopped) = answer(
            "a end</think>b end",
            Split::Chat { thinking: true },
            &["end"],
        );
        assert_eq!(completion.reasoning.as_deref(), Some("a end"));
        assert_eq!((completion.content.as_str(), stopped), ("b ", true));
    }
}
