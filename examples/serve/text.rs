//! From the tokens of a choice to its text, while they arrive.

use ds4_model::generate::{
    CompletionPart, CompletionSplitter, DecodeStream, FinishReason, GenerateError, StopStrings,
    TextTokenizer,
};

use crate::engine::Token;
use crate::log_probs::ListedToken;
use crate::request::Thinking;

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
    decoder: DecodeStream<'static>,
    /// `None` for a completion, all of which is content.
    splitter: Option<CompletionSplitter>,
    one_call: bool,
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
    /// The text of a choice, taken apart if it is one of a chat.
    pub fn new(
        tokenizer: &'static TextTokenizer,
        chat: Option<Thinking>,
        stops: &[String],
    ) -> Result<Self, GenerateError> {
        Ok(Self {
            tokenizer,
            // The splitter knows what to do with special tokens; a completion has none.
            decoder: tokenizer.decode_stream(chat.is_none()),
            splitter: chat.map(|chat| CompletionSplitter::new(chat.thinking)),
            one_call: chat.is_some_and(|chat| chat.one_call),
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
        let mut parts = match &mut self.splitter {
            None => vec![CompletionPart::Content(text)],
            Some(splitter) => splitter.push(&text),
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
        splitter.is_none_or(CompletionSplitter::is_content)
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
                if self.one_call {
                    update.finish = Some("tool_calls");
                }
            }
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
