//! What can go wrong between a prompt and its continuation.

use std::path::PathBuf;

use crate::printable::{Printable, place};

/// An error of text generation. Every variant names the input at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// A sampling parameter is outside its range.
    #[error("sampling parameter `{name}` is {value}, expected {expected}")]
    SamplingParameter {
        /// Field of [`SamplingConfig`](super::SamplingConfig).
        name: &'static str,
        /// The value that was given.
        value: f32,
        /// The range that is accepted.
        expected: &'static str,
    },
    /// No token can be chosen: the logits are empty or hold nothing but NaN and negative infinity.
    #[error("no token can be chosen: none of the {len} logits is a number above negative infinity")]
    NoCandidate {
        /// Number of logits.
        len: usize,
    },
    /// The constraint of a text allows no token, or cannot go on.
    #[error("the constraint of the text failed: {reason}")]
    Constraint {
        /// What the constraint says.
        reason: String,
    },
    /// An entry of the logit bias cannot be used.
    #[error("`logit_bias[{index}]`: {reason}")]
    LogitBias {
        /// Position in the list.
        index: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// More log-probabilities are wanted than are listed.
    #[error("`log_probs` is {top}, expected at most {maximum}")]
    TooManyLogProbs {
        /// The value that was given.
        top: usize,
        /// Largest number that is accepted.
        maximum: usize,
    },
    /// A stop string without characters would stop before the first token.
    #[error("stop string {index} is empty")]
    EmptyStopString {
        /// Position in the list of stop strings.
        index: usize,
    },
    /// There is nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A token of the prompt lies outside the model's vocabulary.
    #[error("`prompt[{index}]` is token {token}, but the model's vocabulary has {vocab_size}")]
    PromptToken {
        /// Position in the prompt.
        index: usize,
        /// The id at that position.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// The prompt does not fit the context: the model's, or that of the engine.
    #[error("the prompt has {tokens} tokens, the context {maximum}")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens of the longest context.
        maximum: usize,
    },
    /// More drafts are wanted than are ever useful, or than a drafter's block has.
    #[error("`drafts` is {drafts}, expected 0..={maximum}")]
    TooManyDrafts {
        /// The value that was given.
        drafts: usize,
        /// Largest number that is accepted.
        maximum: usize,
    },
    /// The prompt cannot be processed in pieces of nothing.
    #[error("`prefill_chunk` is 0, expected at least 1")]
    EmptyPrefillChunk,
    /// Drafts are wanted from a model without an MTP layer and without a DSpark drafter.
    #[error(
        "drafts need an MTP layer or a DSpark drafter, which this model does not have (or which \
         was not loaded)"
    )]
    NoDrafter,
    /// No probability.
    #[error("`draft_confidence` is {value}, expected 0 to 1")]
    DraftConfidence {
        /// The value that was given.
        value: f64,
    },
    /// A clustered head that is not of this model's vocabulary.
    #[error("the clustered head has {tokens} tokens, the model's vocabulary {vocab_size}")]
    HeadVocabulary {
        /// Tokens that the head chooses from.
        tokens: usize,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// No operator chooses among so many tokens.
    #[error("the model's vocabulary has {vocab_size} tokens, at most {maximum} can be chosen from")]
    VocabularyTooLarge {
        /// Size of the vocabulary.
        vocab_size: usize,
        /// Largest size that is accepted.
        maximum: usize,
    },
    /// A clustered head refused what the model computed.
    #[error("the clustered head refused a hidden state: {0}")]
    Head(#[from] burn_ds4_ops::OpError),
    /// No token can be chosen from logits of these sizes on the device.
    #[error("a token cannot be chosen from the logits: {0}")]
    Logits(#[source] burn_ds4_ops::OpError),
    /// More texts are wanted at a time than there are lanes.
    #[error("`lanes` is {lanes}, expected 1..={maximum}")]
    TooManyLanes {
        /// The value that was given.
        lanes: usize,
        /// Largest number that is accepted.
        maximum: usize,
    },
    /// A request that has ended, or never was one of the engine.
    #[error("request {request} is not known, or has ended")]
    UnknownRequest {
        /// The one that was given.
        request: super::request_id::RequestId,
    },
    /// A text needs more memory than caches may take.
    #[error(
        "a text of {positions} positions needs {pages} pages, {missing} more than there may be \
         (`cache_bytes`, `pages`)"
    )]
    CacheMemory {
        /// Positions of the text, and of its next steps.
        positions: usize,
        /// Pages that they take.
        pages: usize,
        /// Pages that are missing though no other text has any.
        missing: usize,
    },
    /// The cache refused a step.
    #[error(transparent)]
    Cache(#[from] crate::cache::CacheError),
    /// A device failed to deliver a result.
    #[error("{device} failed: {reason}")]
    Device {
        /// The device, or those of several that have failed.
        device: String,
        /// The device's own message.
        reason: String,
    },
    /// Devices that have parts of every layer have lost each other.
    #[error(transparent)]
    Group(#[from] burn_ds4_ops::collective::GroupError),
    /// The tokenizer file cannot be read.
    #[error("{}: cannot be read: {source}", place(path))]
    TokenizerRead {
        /// The file.
        path: PathBuf,
        /// Why reading failed.
        source: std::io::Error,
    },
    /// The tokenizer file does not describe a tokenizer that is supported.
    #[error("{}: bad tokenizer: {}", place(path), Printable(reason))]
    TokenizerFormat {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The tokenizer refused a text.
    #[error("tokenizer.json cannot encode the text: {}", Printable(reason))]
    Encode {
        /// The tokenizer's own message.
        reason: String,
    },
    /// Plain text became a reserved token in spite of the precautions.
    #[error(
        "plain text encodes to the reserved token `{}` of tokenizer.json",
        Printable(token)
    )]
    ReservedToken {
        /// The token's text.
        token: String,
    },
    /// A token id that the tokenizer has no text for.
    #[error("token {token} is not in the vocabulary of tokenizer.json")]
    UnknownToken {
        /// The id.
        token: u32,
    },
}

pub(super) fn device_error(device: impl ToString, error: impl ToString) -> GenerateError {
    GenerateError::Device {
        device: device.to_string(),
        reason: error.to_string(),
    }
}
