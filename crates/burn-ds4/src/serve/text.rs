//! From the tokens of a choice to its text, while they arrive.

use deepseek_recipe::stream::{
    CompletionUsage, FinishReason, InferenceFinishReason, OutputChunk, ParsingOptions, PromptUsage,
};
use ds4_model::generate::{FinishReason as End, GenerateError, TextTokenizer};

use crate::conversation::AnswerParser;
use crate::serve::engine::Token;
use crate::serve::log_probs::ListedToken;
use crate::shared::answer_text::PlainText;

/// What a token adds to a choice.
#[derive(Clone, Debug, Default)]
pub struct Update {
    /// Parts of the answer. Those of a completion are content. The last one of a choice says why
    /// it has ended.
    pub chunks: Vec<OutputChunk>,
    /// Tokens of the content that a completion has in them, if their log-probabilities are wanted.
    pub log_probs: Vec<ListedToken>,
}

impl Update {
    /// Why the choice has ended, if it has.
    pub fn finish(&self) -> Option<FinishReason> {
        match self.chunks.last() {
            Some(OutputChunk::Finish { finish_reason, .. }) => Some(*finish_reason),
            _ => None,
        }
    }
}

#[derive(Debug)]
enum Text {
    /// Of a conversation.
    Parsed(AnswerParser),
    /// Of a completion, with the tokens whose text is withheld.
    Plain(PlainText, Vec<ListedToken>),
}

/// The text of a choice.
#[derive(Debug)]
pub struct ChoiceText {
    tokenizer: &'static TextTokenizer,
    text: Text,
    one_call: bool,
    /// Tool calls so far.
    calls: usize,
    /// Tokens so far.
    pub tokens: usize,
    /// Those of them that are reasoning, once the choice has ended and if it may reason.
    pub reasoning: Option<usize>,
    /// Tokens of the prompt that were taken from what was kept of another one.
    pub cached: usize,
}

impl ChoiceText {
    /// The text of a choice, by the options of a conversation if it answers one, which may end
    /// after its first tool call.
    pub fn new(
        tokenizer: &'static TextTokenizer,
        options: Option<ParsingOptions>,
        one_call: bool,
        stops: &[String],
    ) -> Result<Self, GenerateError> {
        Ok(Self {
            tokenizer,
            text: match options {
                Some(options) => Text::Parsed(AnswerParser::new(tokenizer, options)),
                None => Text::Plain(PlainText::new(tokenizer, stops)?, Vec::new()),
            },
            one_call,
            calls: 0,
            tokens: 0,
            reasoning: None,
            cached: 0,
        })
    }

    /// Takes the next token of an answer to so many. No further one is to be given after the choice
    /// has ended.
    pub fn push(&mut self, token: &Token, prompt: usize, fingerprint: &str) -> Update {
        self.cached = token.cached;
        let mut update = Update::default();
        if self.tokens == 0 {
            let usage = PromptUsage {
                prompt_tokens: prompt,
                prompt_cache_hit_tokens: self.cached,
            };
            if let Text::Parsed(parser) = &mut self.text {
                update.chunks = parser.begin(Some(fingerprint.to_owned()), usage);
            }
        }
        self.tokens += 1;
        match self.text {
            Text::Parsed(_) => self.parse(token, &mut update),
            Text::Plain(..) => self.decode(token, &mut update),
        }
        if let Some(OutputChunk::Finish {
            completion_usage, ..
        }) = update.chunks.last_mut()
        {
            // A token that ended the text has no part in it, and counts.
            completion_usage.completion_tokens = self.tokens;
            self.reasoning = completion_usage.reasoning_tokens;
        }
        update
    }

    fn parse(&mut self, token: &Token, update: &mut Update) {
        let Text::Parsed(parser) = &mut self.text else {
            return;
        };
        let is_text = !matches!(token.finish, Some(End::EndOfSequence | End::StopToken));
        let mut chunks = match is_text {
            true => parser.push(token.id, token.log_probs.as_ref()),
            false => Vec::new(),
        };
        let has_ended =
            |chunks: &[OutputChunk]| matches!(chunks.last(), Some(OutputChunk::Finish { .. }));
        let begins = |chunk: &OutputChunk| matches!(chunk, OutputChunk::ToolCallBegin);
        if self.one_call && !has_ended(&chunks) {
            let before = self.calls;
            let mut calls = 0;
            let second = chunks.iter().position(|chunk| {
                calls += usize::from(begins(chunk));
                begins(chunk) && before + calls > 1
            });
            if second.is_some() || parser.calls() > 0 {
                chunks.truncate(second.unwrap_or(chunks.len()));
                let rest = parser.finish(InferenceFinishReason::Stop);
                let last = rest.into_iter().next_back();
                chunks.extend(last.filter(|last| matches!(last, OutputChunk::Finish { .. })));
            }
        }
        if let Some(reason) = token.finish.filter(|_| !has_ended(&chunks)) {
            chunks.extend(parser.finish(match reason {
                End::Length | End::ContextFull => InferenceFinishReason::Length,
                _ => InferenceFinishReason::Stop,
            }));
        }
        self.calls += chunks.iter().filter(|chunk| begins(chunk)).count();
        update.chunks.extend(chunks);
    }

    fn decode(&mut self, token: &Token, update: &mut Update) {
        let Text::Plain(text, withheld) = &mut self.text else {
            return;
        };
        let is_text = !matches!(token.finish, Some(End::EndOfSequence | End::StopToken));
        let mut content = String::new();
        if is_text {
            let offset = text.characters;
            // An id of the model that the tokenizer does not have is no text.
            content = text.push(token.id).unwrap_or_default();
            if let Some(log_probs) = &token.log_probs {
                let listed = ListedToken::new(self.tokenizer, token.id, log_probs, offset);
                withheld.push(listed);
            }
        }
        if token.finish.is_some() {
            content += &text.finish();
        }
        if !content.is_empty() {
            update.log_probs = std::mem::take(withheld);
            update.chunks.push(OutputChunk::Content {
                content,
                logprobs: None,
            });
        }
        let finish = match token.finish {
            _ if text.is_stopped() => FinishReason::StopSequence,
            Some(End::Length | End::ContextFull) => FinishReason::Length,
            Some(_) => FinishReason::Stop,
            None => return,
        };
        update.chunks.push(OutputChunk::Finish {
            finish_reason: finish,
            stop_sequence: None,
            completion_usage: CompletionUsage::default(),
        });
    }
}
