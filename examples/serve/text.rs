//! From the tokens of a choice to its text, while they arrive.

use ds4_model::generate::{CompletionPart, FinishReason, GenerateError, TextTokenizer};

use crate::engine::Token;
use crate::log_probs::ListedToken;
use crate::shared::answer_text::{AnswerText, Split};

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

/// The text of a choice.
#[derive(Debug)]
pub struct ChoiceText {
    tokenizer: &'static TextTokenizer,
    text: AnswerText<'static>,
    one_call: bool,
    /// Tokens whose text is withheld.
    withheld: Vec<ListedToken>,
    /// Tool calls so far.
    pub calls: usize,
    /// Tokens so far.
    pub tokens: usize,
    /// Tokens of the prompt that were taken from what was kept of another one.
    pub cached: usize,
}

impl ChoiceText {
    /// The text of a choice, which may end after its first tool call.
    pub fn new(
        tokenizer: &'static TextTokenizer,
        split: Split,
        one_call: bool,
        stops: &[String],
    ) -> Result<Self, GenerateError> {
        Ok(Self {
            tokenizer,
            text: AnswerText::new(tokenizer, split, stops)?,
            one_call,
            withheld: Vec::new(),
            calls: 0,
            tokens: 0,
            cached: 0,
        })
    }

    /// Takes the next token. No further one is to be given after the choice has ended.
    pub fn push(&mut self, token: &Token) -> Update {
        self.tokens += 1;
        self.cached = token.cached;
        let ends = [FinishReason::EndOfSequence, FinishReason::StopToken].map(Some);
        let mut parts = Vec::new();
        if !ends.contains(&token.finish) {
            let (was_content, offset) = (self.text.is_content(), self.text.characters);
            // An id of the model that the tokenizer does not have is no text.
            parts = self.text.push(token.id).unwrap_or_default();
            if let Some(log_probs) = token.log_probs.as_ref().filter(|_| was_content) {
                let listed = ListedToken::new(self.tokenizer, token.id, log_probs, offset);
                self.withheld.push(listed);
            }
        }
        if token.finish.is_some() {
            parts.extend(self.text.finish());
        }
        let mut update = Update::default();
        for part in parts {
            self.take(part, &mut update);
        }
        if self.text.is_stopped() {
            update.finish.get_or_insert("stop");
        }
        if token.finish.is_some() && update.finish.is_none() {
            self.finish(token.finish, &mut update);
        }
        let has_content = |part: &CompletionPart| matches!(part, CompletionPart::Content(_));
        if update.parts.iter().any(has_content) {
            update.log_probs = std::mem::take(&mut self.withheld);
        }
        if !self.text.is_content() || update.finish.is_some() {
            // They are markup, or a stop string.
            self.withheld.clear();
        }
        update
    }

    /// Takes a part. Nothing follows the end of a choice.
    fn take(&mut self, part: CompletionPart, update: &mut Update) {
        if update.finish.is_some() {
            return;
        }
        if matches!(part, CompletionPart::Call(_)) {
            self.calls += 1;
            update.finish = self.one_call.then_some("tool_calls");
        }
        update.parts.push(part);
    }

    fn finish(&self, reason: Option<FinishReason>, update: &mut Update) {
        let is_cut = matches!(
            reason,
            Some(FinishReason::Length | FinishReason::ContextFull)
        );
        update.finish = Some(match (is_cut, self.calls) {
            (true, _) => "length",
            (false, 0) => "stop",
            (false, _) => "tool_calls",
        });
        if let Some(error) = self.text.error().filter(|_| !is_cut) {
            tracing::warn!(%error, "an answer");
        }
    }
}
