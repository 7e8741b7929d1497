//! One id for all tokens of like texts.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;
use tokenizers::normalizers::StripAccents;
use tokenizers::{NormalizedString, Normalizer, Tokenizer};

use crate::config::EngramParams;
use crate::files::{self, TOKENIZER_FILE};
use crate::printable::place;

/// Where the ids of a checkpoint are kept beside it: as little-endian `i64`, one for each token, so
/// that the SHA-256 of the file is that which others publish.
pub const ENGRAM_IDS_FILE: &str = "engram_ids.bin";

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
    /// The file of ids is not one that was kept: each id that a token is the first to have is the
    /// next number.
    #[error("{}: the ids of engrams are damaged", place(path))]
    Damaged {
        /// The file.
        path: PathBuf,
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
    /// Kept ones that are damaged or do not fit are made anew, which is logged. Ids of another
    /// tokenizer with as many tokens and ids are not told from its own: whoever changes the
    /// tokenizer removes them.
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
        let misfit = match Self::kept(&kept, params, vocab_size) {
            Ok(ids) => return Ok(ids),
            Err(error) => Some(error).filter(|_| kept.exists()),
        };
        let made = Self::made(&dir.join(TOKENIZER_FILE), params, vocab_size);
        let ids = match (made, misfit) {
            (Ok(ids), None) => ids,
            (Ok(ids), Some(misfit)) => {
                log::warn!("{misfit}: the ids are made anew from {TOKENIZER_FILE}");
                ids
            }
            (Err(error), None) => return Err(error),
            // The file that is there is the one to say something of.
            (Err(_), Some(misfit)) => return Err(misfit),
        };
        if let Err(error) = ids.keep(&kept) {
            log::info!("{}: engram ids are not kept: {error}", place(&kept));
        }
        Ok(ids)
    }

    /// The ids of a file that was [kept](Self::keep).
    fn kept(path: &Path, params: &EngramParams, vocab_size: usize) -> Result<Self, EngramIdsError> {
        let read = files::read(path, 8 * vocab_size as u64);
        let bytes = read.map_err(|source| EngramIdsError::Read {
            path: path.to_path_buf(),
            source,
        })?;
        let (ids, rest) = bytes.as_chunks::<8>();
        let mut known = 0;
        let ids = ids.iter().map(|id| {
            let id = u32::try_from(i64::from_le_bytes(*id)).ok();
            let id = id.filter(|id| *id <= known)?;
            known = known.max(id + 1);
            Some(id)
        });
        let ids: Option<Vec<u32>> = ids.collect();
        let ids = ids.filter(|_| rest.is_empty());
        let ids = ids.ok_or_else(|| EngramIdsError::Damaged {
            path: path.to_path_buf(),
        })?;
        Self::new(ids).checked(path, params, vocab_size)
    }

    /// The ids of the tokenizer of a file.
    fn made(path: &Path, params: &EngramParams, vocab_size: usize) -> Result<Self, EngramIdsError> {
        let bytes = files::read(path, files::MAX_TEXT_BYTES).map_err(|error| error.to_string());
        let tokenizer = bytes.and_then(|bytes| files::parse_tokenizer(&bytes));
        let tokenizer = tokenizer.map_err(|reason| EngramIdsError::Tokenizer {
            path: path.to_path_buf(),
            reason,
        })?;
        Self::of_tokenizer(&tokenizer).checked(path, params, vocab_size)
    }

    fn keep(&self, path: &Path) -> io::Result<()> {
        let bytes = self.0.iter().flat_map(|id| i64::from(*id).to_le_bytes());
        files::replace(path, &bytes.collect::<Vec<u8>>())
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
