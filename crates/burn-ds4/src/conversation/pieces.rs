//! Pieces of an answer, for a parser that reads token ids.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use deepseek_recipe::stream::StreamTokenizer;
use ds4_model::generate::TextTokenizer;

/// Set in the ids of pieces, which those of tokens do not reach.
const MADE: u32 = 1 << 31;
/// Set in the ids of pieces that are control tokens.
const CONTROL: u32 = 1 << 30;
/// Pieces that are kept: one that has no text yet waits for the next, which ends its character.
const KEPT: usize = 16;

/// A piece: its id, its text, and the token that it comes from.
#[derive(Debug)]
struct Piece {
    id: u32,
    text: String,
    token: Option<u32>,
}

/// Gives pieces ids, and the parser their texts. It decides itself where a character ends, and
/// which tokens control something.
#[derive(Clone, Debug)]
pub struct Pieces {
    tokenizer: TextTokenizer,
    pieces: Arc<Mutex<VecDeque<Piece>>>,
}

impl Pieces {
    pub fn new(tokenizer: TextTokenizer) -> Self {
        Self {
            tokenizer,
            pieces: Arc::default(),
        }
    }

    /// The id of a piece.
    pub fn add(&self, text: String, is_control: bool, token: Option<u32>) -> u32 {
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let last = pieces
            .back()
            .map_or(0, |piece| piece.id & !(MADE | CONTROL));
        let number = (last + 1) % CONTROL;
        let id = MADE | number | if is_control { CONTROL } else { 0 };
        pieces.push_back(Piece { id, text, token });
        if pieces.len() > KEPT {
            pieces.pop_front();
        }
        id
    }

    fn find<T>(&self, id: u32, of: impl FnOnce(&Piece) -> T) -> Option<T> {
        let pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        pieces.iter().find(|piece| piece.id == id).map(of)
    }
}

impl StreamTokenizer for Pieces {
    fn decode_ids(&self, ids: &[u32], _: bool) -> Result<String, String> {
        let texts = ids
            .iter()
            .map(|id| self.find(*id, |piece| piece.text.clone()));
        Ok(texts.map(Option::unwrap_or_default).collect())
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        let token = match id & MADE {
            0 => Some(id),
            _ => self.find(id, |piece| piece.token).flatten(),
        };
        self.tokenizer.token(token?)
    }

    fn is_special_token(&self, id: u32) -> bool {
        id & CONTROL != 0
    }
}
