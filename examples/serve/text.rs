//! From the tokens of a choice to its text, while they arrive.

use ds4_model::generate::{
    CompletionPart, CompletionSplitter, DecodeStream, FinishReason, GenerateError, StopStrings,
    TextTokenizer,
};

use crate::engine::Token;
use crate::log_probs::ListedToken;

/// What a token adds to a choice.
#[derive(Clone, Debug, Default)]
pub struct Update {
    /// Parts of the answer. Those of a completion are content.
    pub parts: Vec<CompletionPart>,
    /// Tokens of the content that is in them, if their log-probabilities are wanted.
    pub log_probs: Vec<ListedToken>,
    /// Why the choice has ended, if it has.
    pub finish: Option<&'static str>,
}

/// How a choice is taken apart.
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
        /// Whether it ends after the first tool call.
        one_call: bool,
    },
}

/// The text of a choice.
#[derive(Debug)]
pub struct ChoiceText {
    tokenizer: &'static TextTokenizer,
    decoder: DecodeStream<'static>,
    split: Split,
    /// Of a choice that follows the chat encoding.
    splitter: Option<CompletionSplitter>,
    stops: StopStrings,
    /// Tokens whose text is withheld.
    withheld: Vec<ListedToken>,
    /// Characters decoded.
    characters: usize,
    /// Tool calls so far.
    pub calls: usize,
    /// Tokens so far.
    pub tokens: usize,
}

impl ChoiceText {
    /// The text of a choice.
    pub fn new(
        tokenizer: &'static TextTokenizer,
        split: Split,
        stops: &[String],
    ) -> Result<Self, GenerateError> {
        Ok(Self {
            tokenizer,
            // The splitter knows what to do with special tokens; others have none.
            decoder: tokenizer.decode_stream(!matches!(split, Split::Chat { .. })),
            splitter: match split {
                Split::Chat { thinking, .. } => Some(CompletionSplitter::new(thinking)),
                _ => None,
            },
            split,
            stops: StopStrings::new(stops)?,
            withheld: Vec::new(),
            characters: 0,
            calls: 0,
            tokens: 0,
        })
    }

    /// Takes the next token. No further one is to be given after the choice has ended.
    pub fn push(&mut self, token: &Token) -> Update {
        self.tokens += 1;
        let ends = [FinishReason::EndOfSequence, FinishReason::StopToken].map(Some);
        let mut text = String::new();
        if !ends.contains(&token.finish) {
            let was_content = self.is_content();
            // An id of the model that the tokenizer does not have is no text.
            text = self.decoder.push(token.id).unwrap_or_default();
            if let Some(log_probs) = token.log_probs.as_ref().filter(|_| was_content) {
                let (id, offset) = (token.id, self.characters);
                let listed = ListedToken::new(self.tokenizer, id, log_probs, offset);
                self.withheld.push(listed);
            }
            self.characters += text.chars().count();
        }
        if token.finish.is_some() {
            text += &self.decoder.finish();
        }
        let mut parts = match (&mut self.splitter, self.split) {
            (Some(splitter), _) => splitter.push(&text),
            (None, Split::Reasoning { end }) if token.id == end => {
                self.split = Split::Content;
                Vec::new()
            }
            (None, Split::Reasoning { .. }) => vec![CompletionPart::Reasoning(text)],
            (None, _) => vec![CompletionPart::Content(text)],
        };
        if token.finish.is_some() {
            parts.extend(
                self.splitter
                    .iter_mut()
                    .flat_map(CompletionSplitter::finish),
            );
        }
        let mut update = Update::default();
        for part in parts {
            self.take(part, &mut update);
        }
        if token.finish.is_some() && update.finish.is_none() {
            self.finish(token.finish, &mut update);
        }
        let has_content = |part: &CompletionPart| matches!(part, CompletionPart::Content(_));
        if update.parts.iter().any(has_content) {
            update.log_probs = std::mem::take(&mut self.withheld);
        }
        if !self.is_content() || update.finish.is_some() {
            // They are markup, or a stop string.
            self.withheld.clear();
        }
        update
    }

    fn is_content(&self) -> bool {
        let splitter = self.splitter.as_ref();
        let is_content = !matches!(self.split, Split::Reasoning { .. });
        splitter.map_or(is_content, CompletionSplitter::is_content)
    }

    /// Takes a part, up to a stop string in the content. Nothing follows the end of a choice.
    fn take(&mut self, part: CompletionPart, update: &mut Update) {
        match part {
            _ if update.finish.is_some() => (),
            CompletionPart::Content(text) => {
                let step = self.stops.push(&text);
                if !step.emit.is_empty() {
                    update.parts.push(CompletionPart::Content(step.emit));
                }
                if step.stopped {
                    update.finish = Some("stop");
                }
            }
            CompletionPart::Call(call) => {
                self.release(update);
                self.calls += 1;
                update.parts.push(CompletionPart::Call(call));
                if matches!(self.split, Split::Chat { one_call: true, .. }) {
                    update.finish = Some("tool_calls");
                }
            }
            // A part of a character has no text yet.
            CompletionPart::Reasoning(text) if text.is_empty() => (),
            reasoning => update.parts.push(reasoning),
        }
    }

    /// Ends the content, of which a stop string may have withheld some.
    fn release(&mut self, update: &mut Update) {
        let rest = self.stops.finish();
        if !rest.is_empty() {
            update.parts.push(CompletionPart::Content(rest));
        }
    }

    fn finish(&mut self, reason: Option<FinishReason>, update: &mut Update) {
        self.release(update);
        let is_cut = matches!(
            reason,
            Some(FinishReason::Length | FinishReason::ContextFull)
        );
        update.finish = Some(match (is_cut, self.calls) {
            (true, _) => "length",
            (false, 0) => "stop",
            (false, _) => "tool_calls",
        });
        let error = self.splitter.as_ref().and_then(CompletionSplitter::error);
        if let Some(error) = error.filter(|_| !is_cut) {
            tracing::warn!(%error, "an answer");
        }
    }
}
