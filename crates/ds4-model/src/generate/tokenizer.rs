//! Text to token ids and back.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use tokenizers::{AddedVocabulary, DecoderWrapper, Tokenizer};

use super::error::GenerateError;
use crate::files::{self, TOKENIZER_FILE};

/// What becomes of tokens that the tokenizer file flags as special, where ids become text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecialTokens {
    /// They are left out.
    #[default]
    Skip,
    /// They are written out, as whoever reads tool calls needs them.
    Keep,
}

/// A checkpoint's byte-level tokenizer.
///
/// It adds no tokens of its own: whatever the file's post-processor says, a prompt begins with the
/// tokens of its text, and a beginning-of-sequence token is there only if the caller puts it there.
/// Clones share one vocabulary.
///
/// # Example
///
/// ```
/// use ds4_model::generate::{SpecialTokens, TextTokenizer};
///
/// let tokenizer = TextTokenizer::from_dir("../../assets/ds4-tiny")?;
/// let user = tokenizer.token_id("<｜User｜>").expect("a token of chats");
/// assert_eq!(tokenizer.encode("<｜User｜>")?, [user]);
/// // What a user writes must not become a control token.
/// let ids = tokenizer.encode_plain("<｜User｜>")?;
/// assert!(!ids.contains(&user));
/// assert_eq!(tokenizer.decode(&ids, SpecialTokens::Keep)?, "<｜User｜>");
/// # Ok::<(), ds4_model::generate::GenerateError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextTokenizer(Arc<Vocabulary>);

#[derive(Debug)]
struct Vocabulary {
    tokenizer: Tokenizer,
    /// The same tokenizer without the added tokens. Released DeepSeek tokenizers flag only few of
    /// theirs as special (`<｜User｜>` is not), so the library's own switch for special tokens would
    /// let the others through.
    plain: Tokenizer,
    added: HashMap<u32, AddedText>,
    vocab_size: usize,
}

#[derive(Clone, Debug)]
struct AddedText {
    text: String,
    special: bool,
}

impl TextTokenizer {
    /// Reads `tokenizer.json` of a checkpoint directory.
    ///
    /// # Errors
    /// [`GenerateError::TokenizerRead`] and [`GenerateError::TokenizerFormat`], both with the
    /// file's path.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self, GenerateError> {
        let path = dir.as_ref().join(TOKENIZER_FILE);
        let bytes = files::read(&path, files::MAX_TEXT_BYTES);
        let bytes = bytes.map_err(|source| GenerateError::TokenizerRead {
            path: path.clone(),
            source,
        })?;
        Self::from_bytes(&bytes).map_err(|reason| GenerateError::TokenizerFormat { path, reason })
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let mut tokenizer = files::parse_tokenizer(bytes)?;
        // Streaming relies on every token being a run of bytes.
        if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err("the decoder is not `ByteLevel`".into());
        }
        // Settings of training batches; a prompt is neither truncated nor padded.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|error| error.to_string())?;
        let mut plain = tokenizer.clone();
        plain.with_added_vocabulary(AddedVocabulary::new());
        let added = tokenizer.get_added_tokens_decoder().into_iter();
        let added = added
            .map(|(id, token)| {
                (
                    id,
                    AddedText {
                        text: token.content,
                        special: token.special,
                    },
                )
            })
            .collect();
        Ok(Self(Arc::new(Vocabulary {
            vocab_size: tokenizer.get_vocab_size(true),
            tokenizer,
            plain,
            added,
        })))
    }

    /// Number of tokens, the added ones included. A model's logits may be wider.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// The id of a token, given the token's text as the vocabulary spells it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.tokenizer.token_to_id(token)
    }

    /// The text of a token, as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.0.tokenizer.id_to_token(id)
    }

    /// Encodes text in which the added tokens, written out, stand for themselves.
    ///
    /// # Errors
    /// [`GenerateError::Encode`] where the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        encode(&self.0.tokenizer, text)
    }

    /// Encodes text of which no part can become an added token: `<think>` is seven characters here.
    ///
    /// # Errors
    /// [`GenerateError::Encode`] where the tokenizer refuses the text,
    /// [`GenerateError::ReservedToken`] where the vocabulary leads back to an added token without
    /// naming it as one.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        let ids = encode(&self.0.plain, text)?;
        match ids.iter().find_map(|id| self.0.added.get(id)) {
            Some(token) => Err(GenerateError::ReservedToken {
                token: token.text.clone(),
            }),
            None => Ok(ids),
        }
    }

    /// Decodes ids; bytes that are not UTF-8 become replacement characters.
    ///
    /// # Errors
    /// [`GenerateError::UnknownToken`] for an id without a token.
    pub fn decode(&self, ids: &[u32], special: SpecialTokens) -> Result<String, GenerateError> {
        let mut stream = self.decode_stream(special);
        let mut text = String::new();
        for &id in ids {
            text += &stream.push(id)?;
        }
        Ok(text + &stream.finish())
    }

    /// Whether a token is an added one, such as `<think>`: it stands for itself, not for text.
    pub fn is_added(&self, id: u32) -> bool {
        self.0.added.contains_key(&id)
    }

    /// The bytes of a token, which may be a part of a character.
    ///
    /// # Errors
    /// [`GenerateError::UnknownToken`] for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>, GenerateError> {
        let token = self
            .token(id)
            .ok_or(GenerateError::UnknownToken { token: id })?;
        let bytes: Option<Vec<u8>> = token.chars().map(byte_of).collect();
        // An added token is spelt in plain text, not in the byte alphabet.
        Ok(bytes.unwrap_or_else(|| token.into_bytes()))
    }

    /// Starts decoding one id at a time.
    pub fn decode_stream(&self, special: SpecialTokens) -> DecodeStream {
        DecodeStream {
            tokenizer: self.clone(),
            special,
            pending: Vec::new(),
        }
    }
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, GenerateError> {
    match tokenizer.encode_fast(text, false) {
        Ok(encoding) => Ok(encoding.get_ids().to_vec()),
        Err(error) => Err(GenerateError::Encode {
            reason: error.to_string(),
        }),
    }
}

/// Decodes ids one at a time into whole characters.
///
/// The bytes of a character that is still incomplete are held back, so that the pieces joined are
/// what [`TextTokenizer::decode`] makes of all ids at once.
///
/// # Example
///
/// ```
/// use ds4_model::generate::{SpecialTokens, TextTokenizer};
///
/// let tokenizer = TextTokenizer::from_dir("../../assets/ds4-tiny")?;
/// let ids = tokenizer.encode("Jehovah-jireh 🙂")?;
/// let mut stream = tokenizer.decode_stream(SpecialTokens::Keep);
/// let pieces = ids.iter().map(|id| stream.push(*id)).collect::<Result<Vec<_>, _>>()?;
/// // The bytes of the last character are several tokens, of which only the last one gives text.
/// assert_eq!(pieces[pieces.len() - 2..], ["", "🙂"]);
/// assert_eq!(pieces.concat(), "Jehovah-jireh 🙂");
/// # Ok::<(), ds4_model::generate::GenerateError>(())
/// ```
#[derive(Clone, Debug)]
pub struct DecodeStream {
    tokenizer: TextTokenizer,
    special: SpecialTokens,
    pending: Vec<u8>,
}

impl DecodeStream {
    /// Takes the next id and returns the text that it completes, possibly none.
    ///
    /// # Errors
    /// [`GenerateError::UnknownToken`] for an id without a token; the stream can go on after it.
    pub fn push(&mut self, id: u32) -> Result<String, GenerateError> {
        if self.special == SpecialTokens::Skip
            && self
                .tokenizer
                .0
                .added
                .get(&id)
                .is_some_and(|token| token.special)
        {
            return Ok(String::new());
        }
        self.pending.extend(self.tokenizer.token_bytes(id)?);
        Ok(self.take_complete())
    }

    /// Ends the text; an incomplete character becomes a replacement character.
    pub fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&rest).into_owned()
    }

    fn take_complete(&mut self) -> String {
        let mut text = String::new();
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            text += chunk.valid();
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            // Only bytes at the very end can still become a character.
            let open = done + invalid.len() == self.pending.len()
                && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if invalid.is_empty() || open {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
        self.pending.drain(..done);
        text
    }
}

/// The byte that a character of the byte-level alphabet stands for. Printable Latin-1 stands for
/// itself; the other 68 bytes, in order, are the characters from U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    match character {
        '!'..='~' | '¡'..='¬' | '®'..='ÿ' => u8::try_from(u32::from(character)).ok(),
        '\u{100}'..='\u{143}' => match (u32::from(character) - 0x100) as u8 {
            rank @ 0..=32 => Some(rank),
            rank @ 33..=66 => Some(rank - 33 + 0x7f),
            _ => Some(0xad),
        },
        _ => None,
    }
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
