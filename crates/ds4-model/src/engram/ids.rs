//! One id for all tokens of like texts.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;
use tokenizers::normalizers::StripAccents;
use tokenizers::{NormalizedString, Normalizer, Tokenizer};

use crate::config::EngramParams;
use crate::printable::place;

/// Where the ids of a checkpoint are kept beside it: as little-endian `i64`, one for each token, so
/// that the SHA-256 of the file is that which others publish.
pub const ENGRAM_IDS_FILE: &str = "engram_ids.bin";
const TOKENIZER_FILE: &str = "tokenizer.json";

/// Why there are no ids for engrams.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngramIdsError {
    /// A file cannot be read.
    #[error("{}: cannot be read: {source}", place(path))]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The tokenizer cannot be read, from which the ids would be made.
    #[error("{}: the ids of engrams cannot be made: {reason}", place(path))]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// There are ids for another number of tokens, or another number of ids.
    #[error("{}: it has {actual} {what}, {key} is {expected}", place(path))]
    Count {
        /// The file.
        path: PathBuf,
        /// What was counted.
        what: &'static str,
        /// How many there are.
        actual: usize,
        /// The key of the configuration.
        key: &'static str,
        /// Its value.
        expected: usize,
    },
}

/// The id of each token that engrams hash. Tokens whose texts are alike but for case, accents and
/// space have one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngramIds(Arc<[u32]>);

impl EngramIds {
    /// Ids that are known, one for each token.
    pub fn new(ids: Vec<u32>) -> Self {
        Self(ids.into())
    }

    /// The ids of a checkpoint's directory: those that are [kept](ENGRAM_IDS_FILE) there, or else
    /// those of its tokenizer, which are kept from then on where the directory can be written to.
    ///
    /// # Errors
    ///
    /// If neither file can be read, or there are not as many tokens, or ids, as the configuration
    /// says.
    pub fn of_checkpoint(
        dir: &Path,
        params: &EngramParams,
        vocab_size: usize,
    ) -> Result<Self, EngramIdsError> {
        let kept = dir.join(ENGRAM_IDS_FILE);
        match fs::read(&kept) {
            Ok(bytes) => {
                let (ids, _) = bytes.as_chunks::<8>();
                let ids = ids.iter().map(|id| i64::from_le_bytes(*id));
                // What is no id counts as one too many.
                let ids = ids.map(|id| u32::try_from(id).unwrap_or(u32::MAX));
                return Self::new(ids.collect()).checked(&kept, params, vocab_size);
            }
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(EngramIdsError::Read { path: kept, source });
            }
            Err(_) => {}
        }
        let path = dir.join(TOKENIZER_FILE);
        let tokenizer = Tokenizer::from_file(&path).map_err(|error| EngramIdsError::Tokenizer {
            path: path.clone(),
            reason: error.to_string(),
        })?;
        let ids = Self::of_tokenizer(&tokenizer).checked(&path, params, vocab_size)?;
        let bytes: Vec<u8> = ids
            .0
            .iter()
            .flat_map(|id| i64::from(*id).to_le_bytes())
            .collect();
        if let Err(error) = fs::write(&kept, bytes) {
            log::info!("{}: engram ids are not kept: {error}", place(&kept));
        }
        Ok(ids)
    }

    /// The ids of a tokenizer's tokens, in the order of these. The first token of a text gets the
    /// next new id.
    ///
    /// # Source
    ///
    /// DeepSeek-V4.1 `inference/engram.py`.
    pub fn of_tokenizer(tokenizer: &Tokenizer) -> Self {
        let mut known: HashMap<String, u32> = HashMap::new();
        let tokens = 0..tokenizer.get_vocab_size(true) as u32;
        let ids = tokens.map(|token| {
            let text = tokenizer.decode(&[token], false).unwrap_or_default();
            let key = match text.contains(char::REPLACEMENT_CHARACTER) {
                // A part of a character has no text of its own.
                true => tokenizer.id_to_token(token).unwrap_or_default(),
                false => Some(folded(&text))
                    .filter(|key| !key.is_empty())
                    .unwrap_or(text),
            };
            let next = known.len() as u32;
            *known.entry(key).or_insert(next)
        });
        Self(ids.collect())
    }

    /// The id of a token.
    ///
    /// # Panics
    ///
    /// If there is no such token.
    pub fn id(&self, token: u32) -> u32 {
        self.0[token as usize]
    }

    /// The ids of all tokens.
    pub fn ids(&self) -> &[u32] {
        &self.0
    }

    fn checked(
        self,
        path: &Path,
        params: &EngramParams,
        vocab_size: usize,
    ) -> Result<Self, EngramIdsError> {
        let ids = self.0.iter().max().map_or(0, |last| *last as usize + 1);
        let tokens = (
            "tokens with engram ids",
            self.0.len(),
            "vocab_size",
            vocab_size,
        );
        let expected = params.compressed_vocab_size;
        let ids = ("engram ids", ids, "engram_compressed_vocab_size", expected);
        for (what, actual, key, expected) in [tokens, ids] {
            if actual != expected {
                return Err(EngramIdsError::Count {
                    path: path.to_path_buf(),
                    what,
                    actual,
                    key,
                    expected,
                });
            }
        }
        Ok(self)
    }
}

/// A text without what does not tell it from like ones: composed by compatibility and decomposed
/// again, without marks, in lower case, with single spaces, and none at its ends.
pub(super) fn folded(text: &str) -> String {
    let mut normal = NormalizedString::from(text);
    normal.nfkc().nfd();
    let stripped = StripAccents.normalize(&mut normal);
    stripped.expect("characters are only removed");
    normal.lowercase();
    let mut key = String::new();
    for c in normal.get().chars() {
        let is_space = [' ', '\t', '\r', '\n'].contains(&c);
        match is_space && key.ends_with(' ') {
            true => {}
            false => key.push(if is_space { ' ' } else { c }),
        }
    }
    match key == " " {
        true => key,
        false => key.trim().to_owned(),
    }
}
