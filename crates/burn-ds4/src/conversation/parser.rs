//! From the tokens of an answer to reasoning, content and calls, while they arrive, by the parser
//! of `deepseek-recipe`.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use deepseek_recipe::stream::{
    ChunkGenerator, CompletionUsage, InferenceChunk, InferenceFinishReason, InferenceTokenLogprob,
    OutputChunk, ParsingOptions, PromptUsage, StreamError, StreamProcessor, ThinkingInitialStage,
    TokenLogprob, TopLogprob,
};
use deepseek_recipe_core::special_tokens::SpecialToken;
use ds4_model::generate::{DecodeStream, SpecialTokens, TextTokenizer, TokenLogProbs};
use futures_util::Stream;
use futures_util::stream::poll_fn;
use futures_util::task::noop_waker;

use super::calls::{Calls, MARK};
use super::hidden::HiddenCalls;
use super::pieces::Pieces;

/// What stands for the log-probability of a token that cannot be chosen, as in OpenAI's API: JSON
/// has no infinity.
const IMPOSSIBLE: f32 = -9999.0;
/// Tokens that separate messages, which are left out of what one of them says.
const SEPARATORS: [SpecialToken; 6] = [
    SpecialToken::Bos,
    SpecialToken::Eos,
    SpecialToken::System,
    SpecialToken::User,
    SpecialToken::Assistant,
    SpecialToken::LatestReminder,
];

/// What a piece of text is to the parser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Text of tokens: control tokens that it spells are none.
    Plain,
    /// Text that may have control tokens, spelled out.
    Text,
}

type Log = Arc<[TokenLogprob]>;
type Chunks = Pin<Box<dyn Stream<Item = Result<OutputChunk, StreamError>> + Send>>;

/// Hands on what the parser finds.
struct AsFound;

impl ChunkGenerator for AsFound {
    type Chunk = OutputChunk;

    async fn generate(&mut self, chunk: OutputChunk) -> Vec<OutputChunk> {
        vec![chunk]
    }
}

/// What the parser is to read; nothing more, once it is closed.
#[derive(Debug, Default)]
struct Feed {
    chunks: VecDeque<InferenceChunk>,
    is_closed: bool,
}

/// Takes an answer apart. Its parts are the same however tokens divide its text.
pub struct AnswerParser {
    tokenizer: TextTokenizer,
    decoder: DecodeStream,
    pieces: Pieces,
    feed: Arc<Mutex<Feed>>,
    chunks: Chunks,
    /// Whether calls are looked for, and what follows their beginning.
    has_tools: bool,
    calls: Option<Calls>,
    /// Bytes of text before the next piece that may belong to its tag.
    before: String,
    hidden: [HiddenCalls; 2],
    /// Log-probabilities of withheld text, and those that were handed on last.
    log: Vec<TokenLogprob>,
    last_log: Option<Log>,
    /// Whether the answer still reasons; `None` where it never does.
    reasons: Option<bool>,
    tokens: usize,
    reasoning_tokens: usize,
}

impl fmt::Debug for AnswerParser {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("AnswerParser")
            .finish_non_exhaustive()
    }
}

impl AnswerParser {
    /// For the answer to a prompt of so many tokens.
    pub fn new(tokenizer: &TextTokenizer, options: ParsingOptions) -> Self {
        let feed: Arc<Mutex<Feed>> = Arc::default();
        let (has_tools, starts) = (options.parse_tool_calls, options.starts_in_tool_calls);
        let reasons = options.thinking_initial_stage;
        let pieces = Pieces::new(tokenizer.clone());
        let processor = StreamProcessor::new(AsFound, options).with_tokenizer(pieces.clone());
        let input = feed.clone();
        let chunks = processor.into_protocol_stream(poll_fn(move |_| {
            let mut feed = input.lock().unwrap_or_else(PoisonError::into_inner);
            match feed.chunks.pop_front() {
                None if !feed.is_closed => Poll::Pending,
                chunk => Poll::Ready(chunk),
            }
        }));
        Self {
            decoder: tokenizer.decode_stream(SpecialTokens::Keep),
            tokenizer: tokenizer.clone(),
            pieces,
            feed,
            chunks: Box::pin(chunks),
            has_tools,
            calls: starts.then(Calls::new),
            before: String::new(),
            hidden: Default::default(),
            log: Vec::new(),
            last_log: None,
            reasons: reasons.map(|stage: ThinkingInitialStage| stage.starts_in_reasoning()),
            tokens: 0,
            reasoning_tokens: 0,
        }
    }

    /// Says what is known before the first token.
    pub fn begin(&mut self, fingerprint: Option<String>, usage: PromptUsage) -> Vec<OutputChunk> {
        self.give(InferenceChunk::Ready {
            system_fingerprint: fingerprint,
            prompt_usage: usage,
        });
        self.found()
    }

    /// Takes the next token. A stop string ends the answer with [`OutputChunk::Finish`].
    pub fn push(&mut self, id: u32, log: Option<&TokenLogProbs>) -> Vec<OutputChunk> {
        self.tokens += 1;
        self.reasoning_tokens += usize::from(self.reasons == Some(true));
        if self.tokenizer.is_added(id) {
            let rest = self.decoder.finish();
            self.plain(rest, None, None);
            let text = self.tokenizer.token(id).unwrap_or_default();
            self.added(&text, log.map(|log| (id, log)));
        } else {
            // An id of the model that the tokenizer does not have is no text.
            let text = self.decoder.push(id).unwrap_or_default();
            self.plain(text, Some(id), log);
        }
        self.found()
    }

    /// Ends the answer: at its end, or because it may have no more tokens.
    pub fn finish(&mut self, reason: InferenceFinishReason) -> Vec<OutputChunk> {
        let rest = self.decoder.finish();
        self.plain(rest, None, None);
        self.advance_calls(true);
        self.give(InferenceChunk::Finish {
            finish_reason: reason,
        });
        self.lock().is_closed = true;
        self.found()
    }

    /// Calls that have ended.
    pub fn calls(&self) -> usize {
        self.calls.as_ref().map_or(0, |calls| calls.ended)
    }

    /// Takes text of which no part is a control token.
    pub(super) fn plain(&mut self, text: String, id: Option<u32>, log: Option<&TokenLogProbs>) {
        if let Some(calls) = &mut self.calls {
            calls.push(&text);
            self.advance_calls(false);
            return;
        }
        self.remember(&text);
        // The parser waits where text ends with this character, which here stands for itself.
        let end = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        let (text, broken) = text.split_at(end);
        let piece = self.pieces.add(text.to_owned(), false, id);
        self.give(InferenceChunk::Tokens {
            token_ids: vec![piece],
            logprobs: log.map(|log| vec![listed(log)]),
        });
        self.text(broken);
    }

    /// Takes an added token: one that controls something, or text that may spell some.
    pub(super) fn added(&mut self, text: &str, log: Option<(u32, &TokenLogProbs)>) {
        let is = |token: SpecialToken| token.default_str() == text;
        let is_dropped = is(SpecialToken::ThinkingStart) || SEPARATORS.into_iter().any(is);
        match &mut self.calls {
            Some(calls) => {
                let mut rest = text;
                while let Some((before, after)) = rest.split_once(MARK) {
                    calls.push(before);
                    calls.push_mark();
                    rest = after;
                }
                calls.push(rest);
                self.advance_calls(false);
            }
            None if is(SpecialToken::ThinkingEnd) => {
                self.end_reasoning();
                let piece = self.pieces.add(text.to_owned(), true, None);
                self.give(InferenceChunk::Tokens {
                    token_ids: vec![piece],
                    logprobs: None,
                });
            }
            None if is_dropped => (),
            None => self.spelled(text, log),
        }
    }

    /// Takes text that may spell control tokens, before any call.
    fn spelled(&mut self, text: &str, log: Option<(u32, &TokenLogProbs)>) {
        let mark = text.find(MARK).filter(|_| self.has_tools);
        let (before, rest) = text.split_at(mark.unwrap_or(text.len()));
        if before.contains(SpecialToken::ThinkingEnd.default_str()) {
            self.end_reasoning();
        }
        let mut left = before.to_owned();
        for token in SEPARATORS {
            left = left.replace(token.default_str(), "");
        }
        self.remember(before);
        if let Some((id, log)) = log.filter(|_| rest.is_empty() && !left.is_empty()) {
            let log = self.token_log(id, log);
            self.log.push(log);
        }
        self.text(&left);
        if let Some(after) = rest.strip_prefix(MARK) {
            // Without a tag around it, the token is out of place.
            if self.before.ends_with('<') {
                self.end_reasoning();
                let mut calls = Calls::new();
                calls.push_mark();
                self.calls = Some(calls);
            }
            self.added(after, None);
        }
    }

    fn token_log(&self, id: u32, log: &TokenLogProbs) -> TokenLogprob {
        let text = |id: u32| {
            let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
            (String::from_utf8_lossy(&bytes).into_owned(), bytes)
        };
        let top = log.top.iter().map(|(id, value)| {
            let (token, bytes) = text(*id);
            TopLogprob {
                token,
                bytes,
                logprob: value.max(IMPOSSIBLE),
            }
        });
        let top_logprobs = top.collect();
        let (token, bytes) = text(id);
        TokenLogprob {
            token,
            bytes,
            logprob: log.chosen.max(IMPOSSIBLE),
            top_logprobs,
        }
    }

    fn end_reasoning(&mut self) {
        self.reasons = self.reasons.map(|_| false);
    }

    fn remember(&mut self, text: &str) {
        if let Some(last) = text.chars().last() {
            self.before.clear();
            self.before.push(last);
        }
    }

    fn advance_calls(&mut self, is_end: bool) {
        let Some(mut calls) = self.calls.take() else {
            return;
        };
        let mut pieces = Vec::new();
        calls.advance(is_end, &mut |kind, text| pieces.push((kind, text)));
        self.calls = Some(calls);
        for (kind, text) in pieces {
            if kind == Kind::Plain {
                let end = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
                let piece = self.pieces.add(text[..end].to_owned(), false, None);
                self.give(InferenceChunk::Tokens {
                    token_ids: vec![piece],
                    logprobs: None,
                });
                self.text(&text[end..]);
            } else {
                self.text(&text);
            }
        }
    }

    fn text(&mut self, text: &str) {
        if !text.is_empty() {
            self.give(InferenceChunk::Text {
                content: text.to_owned(),
                token_count: 0,
            });
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Feed> {
        self.feed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give(&mut self, chunk: InferenceChunk) {
        self.lock().chunks.push_back(chunk);
    }

    /// What the parser makes of all that it was given.
    pub(super) fn found(&mut self) -> Vec<OutputChunk> {
        let (mut found, waker) = (Vec::new(), noop_waker());
        let mut context = Context::from_waker(&waker);
        while let Poll::Ready(Some(chunk)) = self.chunks.as_mut().poll_next(&mut context) {
            match chunk {
                Ok(chunk) => self.hand_on(chunk, &mut found),
                // Pieces have texts, and one log-probability at most.
                Err(error) => tracing::error!(%error, "an answer cannot be parsed"),
            }
        }
        found
    }

    fn hand_on(&mut self, chunk: OutputChunk, found: &mut Vec<OutputChunk>) {
        match chunk {
            OutputChunk::Reasoning { content, logprobs } => {
                self.text_found(true, &content, logprobs, found);
            }
            OutputChunk::Content { content, logprobs } => {
                self.text_found(false, &content, logprobs, found);
            }
            OutputChunk::Finish {
                finish_reason,
                stop_sequence,
                ..
            } => {
                for is_reasoning in [true, false] {
                    let text = self.hidden[usize::from(is_reasoning)].finish();
                    self.emit(is_reasoning, text, found);
                }
                let reasoning = self.reasons.map(|_| self.reasoning_tokens);
                found.push(OutputChunk::Finish {
                    finish_reason,
                    stop_sequence,
                    completion_usage: CompletionUsage {
                        completion_tokens: self.tokens,
                        reasoning_tokens: reasoning,
                    },
                });
            }
            chunk => found.push(chunk),
        }
    }

    fn text_found(
        &mut self,
        is_reasoning: bool,
        text: &str,
        log: Option<Log>,
        found: &mut Vec<OutputChunk>,
    ) {
        // Text that was divided has the log-probabilities of all of it, again and again.
        let same = |last: &Log| log.as_ref().is_some_and(|log| Arc::ptr_eq(last, log));
        if !self.last_log.as_ref().is_some_and(same)
            && let Some(log) = &log
        {
            self.log.extend_from_slice(log);
            self.last_log = Some(log.clone());
        }
        if !is_reasoning {
            let rest = self.hidden[1].finish();
            self.emit(true, rest, found);
        }
        let text = match self.has_tools {
            true => text.to_owned(),
            false => self.hidden[usize::from(is_reasoning)].push(text),
        };
        self.emit(is_reasoning, text, found);
    }

    fn emit(&mut self, is_reasoning: bool, content: String, found: &mut Vec<OutputChunk>) {
        if content.is_empty() {
            return;
        }
        let log = std::mem::take(&mut self.log);
        let logprobs = (!log.is_empty()).then(|| log.into());
        found.push(match is_reasoning {
            true => OutputChunk::Reasoning { content, logprobs },
            false => OutputChunk::Content { content, logprobs },
        });
    }
}

fn listed(log: &TokenLogProbs) -> InferenceTokenLogprob {
    let top = log.top.iter();
    InferenceTokenLogprob {
        logprob: log.chosen.max(IMPOSSIBLE),
        top_logprobs: top
            .map(|(id, value)| (*id, value.max(IMPOSSIBLE)))
            .collect(),
    }
}
