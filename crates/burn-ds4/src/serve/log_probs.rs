//! Log-probabilities, in the form of completions.

use ds4_model::generate::{TextTokenizer, TokenLogProbs};
use serde_json::{Map, Value, json};

/// What stands for the log-probability of a token that cannot be chosen, as in OpenAI's API: JSON
/// has no infinity.
const IMPOSSIBLE: f32 = -9999.0;

/// A token and its log-probabilities.
#[derive(Clone, Debug)]
pub struct ListedToken {
    token: Listed,
    top: Vec<Listed>,
    /// Characters of the text before it.
    offset: usize,
}

#[derive(Clone, Debug)]
struct Listed {
    bytes: Vec<u8>,
    log_prob: f32,
}

impl Listed {
    fn new(tokenizer: &TextTokenizer, id: u32, log_prob: f32) -> Self {
        Self {
            // An id of the model that the tokenizer does not have is no text.
            bytes: tokenizer.token_bytes(id).unwrap_or_default(),
            log_prob: log_prob.max(IMPOSSIBLE),
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

impl ListedToken {
    /// A token that begins after so many characters of the text.
    pub fn new(tokenizer: &TextTokenizer, id: u32, found: &TokenLogProbs, offset: usize) -> Self {
        let top = found.top.iter();
        let top = top.map(|(id, log_prob)| Listed::new(tokenizer, *id, *log_prob));
        Self {
            token: Listed::new(tokenizer, id, found.chosen),
            top: top.collect(),
            offset,
        }
    }
}

/// The form that completions have.
pub fn of_completion(tokens: &[ListedToken]) -> Value {
    let top = tokens.iter().map(|listed| {
        let entries = listed.top.iter();
        let entries = entries.map(|top| (top.text(), json!(top.log_prob)));
        entries.collect::<Map<_, _>>()
    });
    let each = |value: fn(&ListedToken) -> Value| tokens.iter().map(value).collect::<Value>();
    json!({
        "tokens": each(|listed| json!(listed.token.text())),
        "token_logprobs": each(|listed| json!(listed.token.log_prob)),
        "top_logprobs": top.collect::<Vec<_>>(),
        "text_offset": each(|listed| json!(listed.offset)),
    })
}
