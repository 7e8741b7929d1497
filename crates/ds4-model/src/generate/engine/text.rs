//! The host's side of a text: what was generated, and when it ends.

use std::collections::BTreeMap;

use super::config::Request;
use super::constraint::LaneConstraint;
use super::mark::Mark;
use super::setup::Caches;
use crate::config::ModelConfig;
use crate::generate::error::GenerateError;
use crate::generate::request_id::RequestId;

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended the sequence.
    EndOfSequence,
    /// A stop token was generated.
    StopToken,
    /// A stop string was generated.
    StopString,
    /// The requested number of tokens was generated.
    Length,
    /// The longest context was reached: the model's, or [`EngineConfig::context`].
    ///
    /// [`EngineConfig::context`]: crate::generate::EngineConfig::context
    ContextFull,
}

/// Log-probabilities of a token: at temperature 1, before penalties, constraints and filters.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogProbs {
    /// That of the token itself.
    pub chosen: f32,
    /// The most likely tokens with theirs, the most likely first.
    pub top: Vec<(u32, f32)>,
}

/// A token of a text.
#[derive(Debug)]
pub struct Output {
    /// The text.
    pub request: RequestId,
    /// The token, or why there is none: the text has then ended.
    pub token: Result<u32, GenerateError>,
    /// Its log-probabilities, if the request wants them.
    pub log_probs: Option<TokenLogProbs>,
    /// Why it was the last one. At the end of a text, the end-of-sequence token is a token like
    /// others.
    pub finish: Option<FinishReason>,
    /// Tokens of the text's prompt that were taken from what was kept of another one.
    pub cached: usize,
}

/// Texts that have not ended, in the order of their requests.
pub(super) type Texts = BTreeMap<RequestId, Text>;

/// A text, in a lane or on its way there.
#[derive(Debug)]
pub(super) struct Text {
    pub(super) id: RequestId,
    pub(super) request: Request,
    /// Prompt and output. All but the last have been through the model.
    pub(super) tokens: Vec<u32>,
    /// Length of the prompt.
    pub(super) prompt: usize,
    /// Drafts that the next step verifies, and those that were dropped.
    pub(super) drafts: usize,
    pub(super) dropped: usize,
    /// Row of the last step that the last token was chosen by, while that is known.
    pub(super) last_row: Option<usize>,
    /// Whether the last token was the last.
    pub(super) ended: bool,
    /// Whether it ended by an error.
    pub(super) failed: bool,
    /// Lengths that its prompt can be continued from.
    pub(super) marks: Vec<Mark>,
    /// Tokens of the prompt that were taken from what was kept of another one.
    pub(super) cached: usize,
    /// The first of those texts with the same prompt that came one after the other.
    pub(super) like: RequestId,
    /// Tokens of the prompt that the model has processed.
    pub(super) processed: usize,
    /// The caches that they are in, until the text has a lane of its own.
    pub(super) caches: Option<Caches>,
    /// What decides which tokens it may have, unless its lane has it.
    pub(super) constraint: Option<LaneConstraint>,
}

impl Text {
    pub(super) fn new(id: RequestId, mut request: Request) -> Self {
        let tokens = std::mem::take(&mut request.prompt);
        let constraint = request.constraint.take();
        Self {
            id,
            request,
            like: id,
            processed: 0,
            caches: None,
            constraint: constraint.map(LaneConstraint::new),
            prompt: tokens.len(),
            tokens,
            drafts: 0,
            dropped: 0,
            last_row: None,
            ended: false,
            failed: false,
            marks: Vec::new(),
            cached: 0,
        }
    }

    /// Tokens to be generated yet.
    pub(super) fn wanted(&self) -> usize {
        let generated = self.tokens.len() - self.prompt;
        self.request.max_new_tokens - generated
    }

    /// Tokens that it may have in the end, the prompt included.
    pub(super) fn most_tokens(&self) -> usize {
        self.prompt.saturating_add(self.request.max_new_tokens)
    }

    /// Drafts that the next step has to verify: without those that the drafter has left out.
    pub(super) fn useful_drafts(&self) -> usize {
        let most = self.wanted().saturating_sub(1);
        (self.drafts + self.dropped).min(most)
    }

    /// Prompt and output, if the choice of tokens depends on them.
    pub(super) fn history(&self) -> Option<[&[u32]; 2]> {
        let changes = self.request.sampling.changes_logits();
        let (prompt, output) = self.tokens.split_at(self.prompt);
        changes.then_some([prompt, output])
    }

    /// Adds the token that a step has chosen, negative where there is none. The text ends after
    /// `longest` tokens that have been through the model.
    pub(super) fn push(
        &mut self,
        token: i32,
        log_probs: impl FnOnce() -> Option<(f32, Vec<(u32, f32)>)>,
        model: &ModelConfig,
        longest: usize,
    ) -> Output {
        let Ok(token) = u32::try_from(token) else {
            return self.fail(GenerateError::NoCandidate {
                len: model.vocab_size,
            });
        };
        self.tokens.push(token);
        let finish = if token == model.eos_token_id && !self.request.ignore_eos {
            Some(FinishReason::EndOfSequence)
        } else if self.request.stop_tokens.contains(&token) {
            Some(FinishReason::StopToken)
        } else if self.wanted() == 0 {
            Some(FinishReason::Length)
        } else if self.tokens.len() > longest {
            Some(FinishReason::ContextFull)
        } else {
            None
        };
        self.ended = finish.is_some();
        let wanted = self.request.log_probs;
        let log_probs = wanted.and_then(|wanted| {
            let (chosen, mut top) = log_probs()?;
            top.truncate(wanted);
            Some(TokenLogProbs { chosen, top })
        });
        Output {
            request: self.id,
            token: Ok(token),
            log_probs,
            finish,
            cached: self.cached,
        }
    }

    /// Ends the text by an error.
    pub(super) fn fail(&mut self, error: GenerateError) -> Output {
        self.ended = true;
        self.failed = true;
        Output {
            request: self.id,
            token: Err(error),
            log_probs: None,
            finish: None,
            cached: self.cached,
        }
    }
}
