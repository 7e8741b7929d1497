//! Text in, text out.

use std::ops::ControlFlow;

use super::engine::FinishReason;
use super::error::GenerateError;
use super::generation::{GenerateConfig, Generation};
use super::stats::SpeculativeStats;
use super::stop::StopStrings;
use super::tokenizer::{DecodeStream, TextTokenizer};
use crate::model::Model;

/// A generation in progress: an iterator over pieces of the new text.
///
/// A piece is never empty, holds complete characters only, and nothing that might turn out to be a
/// stop string.
#[derive(Debug)]
pub struct TextGeneration<'a> {
    tokens: Generation<'a>,
    decoder: DecodeStream,
    stops: StopStrings,
    generated: usize,
    /// Whether the decoder and the stop strings have given up what they held back.
    flushed: bool,
}

impl<'a> TextGeneration<'a> {
    /// Prepares to continue the token ids of `prompt`, as [`Generation::new`].
    ///
    /// # Errors
    ///
    /// As [`Generation::new`], and if a stop string is empty.
    pub fn new(
        model: &'a Model,
        tokenizer: &TextTokenizer,
        config: GenerateConfig,
        prompt: &[u32],
    ) -> Result<Self, GenerateError> {
        Ok(Self {
            stops: StopStrings::new(config.stop_strings.clone())?,
            decoder: tokenizer.decode_stream(config.special_tokens),
            tokens: Generation::new(model, config, prompt)?,
            generated: 0,
            flushed: false,
        })
    }

    /// Runs the prompt through the model, see [`Generation::prefill`].
    ///
    /// # Errors
    ///
    /// As [`Generation::prefill`].
    pub fn prefill(&mut self) -> Result<(), GenerateError> {
        self.tokens.prefill()
    }

    /// Calls `on_text` with every piece of text until the generation ends or it answers
    /// [`ControlFlow::Break`].
    ///
    /// # Errors
    ///
    /// The first error of the generation.
    pub fn stream(
        &mut self,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<(), GenerateError> {
        for piece in self {
            if on_text(&piece?).is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Number of tokens generated so far.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// Why the steps are not replayed as graphs, see [`Generation::graph_refusal`].
    pub fn graph_refusal(&self) -> Option<&str> {
        self.tokens.graph_refusal()
    }

    /// Drafts made and accepted so far.
    pub fn stats(&self) -> &SpeculativeStats {
        self.tokens.stats()
    }

    /// Why the generation ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        if self.stops.stopped() {
            Some(FinishReason::StopString)
        } else {
            self.tokens.finish_reason()
        }
    }

    fn piece(&mut self) -> Result<Option<String>, GenerateError> {
        while !self.flushed {
            if self.stops.stopped() {
                self.flushed = true;
                break;
            }
            let Some(token) = self.tokens.next() else {
                self.flushed = true;
                let rest = self.stops.push(&self.decoder.finish());
                let text = if rest.stopped {
                    rest.emit
                } else {
                    rest.emit + &self.stops.finish()
                };
                return Ok(Some(text).filter(|text| !text.is_empty()));
            };
            let text = self.decoder.push(token?)?;
            self.generated += 1;
            let step = self.stops.push(&text);
            if !step.emit.is_empty() {
                return Ok(Some(step.emit));
            }
        }
        Ok(None)
    }
}

impl Iterator for TextGeneration<'_> {
    type Item = Result<String, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        let piece = self.piece();
        self.flushed |= piece.is_err();
        piece.transpose()
    }
}
