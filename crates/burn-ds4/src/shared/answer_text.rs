//! From the tokens of a text to the text, while they arrive.

use ds4_model::generate::{DecodeStream, GenerateError, SpecialTokens, StopStrings, TextTokenizer};

/// A text that continues another one.
#[derive(Debug)]
pub struct PlainText {
    decoder: DecodeStream,
    stops: StopStrings,
    /// Characters decoded.
    pub characters: usize,
}

impl PlainText {
    /// The text that follows a prompt, up to any of these.
    pub fn new(tokenizer: &TextTokenizer, stops: &[String]) -> Result<Self, GenerateError> {
        Ok(Self {
            decoder: tokenizer.decode_stream(SpecialTokens::Skip),
            stops: StopStrings::new(stops)?,
            characters: 0,
        })
    }

    /// Takes the next token, and returns the text that is known to belong to it.
    pub fn push(&mut self, id: u32) -> Result<String, GenerateError> {
        let text = self.decoder.push(id)?;
        Ok(self.take(&text))
    }

    /// What was withheld, once no token follows.
    pub fn finish(&mut self) -> String {
        let text = self.decoder.finish();
        let text = self.take(&text);
        match self.is_stopped() {
            true => text,
            false => text + &self.stops.finish(),
        }
    }

    /// Whether a stop string has ended the text.
    pub fn is_stopped(&self) -> bool {
        self.stops.stopped()
    }

    fn take(&mut self, text: &str) -> String {
        self.characters += text.chars().count();
        match self.is_stopped() {
            true => String::new(),
            false => self.stops.push(text).emit,
        }
    }
}
