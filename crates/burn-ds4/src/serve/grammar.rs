//! What an answer has to be like, as a constraint of the engine, by the crate `llguidance`.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use deepseek_recipe_core::tools::ToolDefinition;
use ds4_model::generate::{Constraint, ConstraintError};
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::Value;

use crate::conversation::{Encoding, MARK};
use crate::serve::call_grammar::{self, Check};
use crate::serve::engine::Loaded;
use crate::serve::schema::{document, multiples};

/// Longer tokens are never allowed: the crate has no place for them.
const MAX_TOKEN: usize = 512;
/// Bytes of the stack of a thread that works with a schema: the crate goes as deep as an object has
/// properties, and a stack that is too small ends the program.
pub const STACK: usize = 64 << 20;
/// Most characters of a message about a schema.
const MAX_MESSAGE: usize = 300;
/// White space between two parts of a document: a text could go on with it for ever otherwise.
const WHITE_SPACE: &str = r" |\r?\n[ \t]{0,20}";

/// What an answer has to be like.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// A document that follows a schema.
    Json(Value),
    /// A text that matches a regular expression.
    Regex(String),
    /// Calls, whose beginning the prompt has.
    Calls(CallRules),
    /// Calls, or any text, or one that is wanted.
    CallsOr(CallRules, Option<Box<Wanted>>),
}

/// Which calls an answer may have.
#[derive(Clone, Debug)]
pub struct CallRules {
    /// Tools that may be called.
    pub tools: Vec<ToolDefinition>,
    /// Whether there may be one call only.
    pub one_call: bool,
    /// Whose tags they have.
    pub encoding: Encoding,
}

/// What cannot be followed, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// A tool.
    Tools(String),
    /// The format of the content.
    Format(String),
}

/// Makes constraints for the tokens of a model.
pub struct Grammars {
    factory: ParserFactory,
    /// All tokens that are text.
    text: Arc<[u32]>,
    /// The token that marks tags.
    mark: Option<u32>,
    /// Held while a schema is read, which may take memory.
    reading: Mutex<()>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Grammars").finish_non_exhaustive()
    }
}

impl Grammars {
    /// Sorts the vocabulary, which takes a moment.
    pub fn new(loaded: &Loaded) -> Self {
        let (config, stops) = (&loaded.config, &loaded.defaults.stop_tokens);
        let vocabulary = config.vocab_size as u32;
        let words: Vec<Vec<u8>> = (0..vocabulary).map(|id| word(loaded, id)).collect();
        let mut text = vec![0; words.len().div_ceil(32)];
        for (id, word) in words.iter().enumerate() {
            let is_text = !word.is_empty() && word[0] != TokTrie::SPECIAL_TOKEN_MARKER;
            text[id / 32] |= u32::from(is_text) << (id % 32);
        }
        // A text may end with any of these.
        let mut ends = vec![config.eos_token_id];
        ends.extend(stops.iter().filter(|stop| **stop < vocabulary));
        let info = TokRxInfo::new(vocabulary, config.eos_token_id);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let factory = ParserFactory::new_simple(&tokens);
        let mut factory = factory.expect("the crate's own expressions are valid");
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            // Each takes 1 to 2 kB.
            max_lexer_states: 25_000,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Self {
            factory,
            text: text.into(),
            mark: loaded.tokenizer.token_id(MARK),
            reading: Mutex::default(),
        }
    }

    /// Allows what is wanted, or says why it cannot.
    pub fn constraint(&self, wanted: Wanted) -> Result<Box<dyn Constraint>, Unfit> {
        let unfit = match wanted {
            Wanted::Json(_) | Wanted::Regex(_) => Unfit::Format,
            Wanted::Calls(_) | Wanted::CallsOr(..) => Unfit::Tools,
        };
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK);
            let thread = thread.spawn_scoped(scope, || self.read(&wanted));
            let ended = thread.map_err(|error| unfit(error.to_string()))?.join();
            ended.unwrap_or_else(|_| Err(unfit("the schema cannot be read".into())))
        })
    }

    fn read(&self, wanted: &Wanted) -> Result<Box<dyn Constraint>, Unfit> {
        if let Wanted::Json(_) | Wanted::Regex(_) = wanted {
            let grammar = self.format(wanted).map_err(Unfit::Format)?;
            let matcher = self.matcher(grammar).map_err(Unfit::Format)?;
            return Ok(Box::new(Ruled(matcher)));
        }
        if let Wanted::CallsOr(_, Some(format)) = wanted {
            let format = self.format(format).and_then(|format| self.begins(format));
            format.map_err(Unfit::Format)?;
        }
        let mark = self
            .mark
            .ok_or_else(|| format!("the tokenizer has no `{MARK}`"));
        let lark = call_grammar::lark(wanted, mark.map_err(Unfit::Tools)?, self)?;
        let matcher = self.matcher(TopLevelGrammar::from_lark(lark));
        Ok(Box::new(Ruled(matcher.map_err(Unfit::Tools)?)))
    }

    /// The grammar of what is no call.
    pub fn format(&self, wanted: &Wanted) -> Result<TopLevelGrammar, String> {
        match wanted {
            Wanted::Json(schema) => {
                let schema = compiled(schema)?;
                for numbers in multiples(&schema) {
                    self.begins(TopLevelGrammar::from_json_schema(numbers))?;
                }
                Ok(TopLevelGrammar::from_json_schema(schema))
            }
            Wanted::Regex(regex) => Ok(TopLevelGrammar::from_regex(regex)),
            Wanted::Calls(_) | Wanted::CallsOr(..) => Err("calls or calls".into()),
        }
    }

    fn matcher(&self, grammar: TopLevelGrammar) -> Result<Matcher, String> {
        let mut matcher = Matcher::new(self.factory.create_parser(grammar));
        // What nothing can follow is found now, and not in the engine.
        let first = matcher.compute_mask();
        match matcher.get_error().or(first.err().map(|e| e.to_string())) {
            None => Ok(matcher),
            Some(error) => Err(message(&error)),
        }
    }

    /// Lets any text go before, up to the token `end`.
    pub fn after_reasoning(&self, answer: Box<dyn Constraint>, end: u32) -> Box<dyn Constraint> {
        Box::new(AfterReasoning {
            answer,
            text: self.text.clone(),
            end: Some(end),
        })
    }
}

impl Check for Grammars {
    fn reads(&self, grammar: TopLevelGrammar) -> Result<(), String> {
        let tokens = self.factory.tok_env().clone();
        let (init, limits) = (GrammarInit::Serialized(grammar), self.factory.limits());
        // The crate catches its panics elsewhere, but not here.
        let read = AssertUnwindSafe(|| init.validate(Some(tokens), limits.clone()).into_error());
        match catch_unwind(read) {
            Ok(None) => Ok(()),
            Ok(Some(error)) => Err(message(&error)),
            Err(_) => Err("the schema cannot be read".into()),
        }
    }

    fn begins(&self, grammar: TopLevelGrammar) -> Result<(), String> {
        self.matcher(grammar).map(drop)
    }
}

/// The bytes of a token. Those of tokens that are no text begin like no text.
fn word(loaded: &Loaded, id: u32) -> Vec<u8> {
    let bytes = loaded.tokenizer.token_bytes(id).unwrap_or_default();
    match bytes.len() {
        0 | MAX_TOKEN.. => Vec::new(),
        _ if loaded.tokenizer.is_added(id) => {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat()
        }
        _ => bytes,
    }
}

/// A schema as it is compiled, with the white space that its documents may have.
pub fn compiled(schema: &Value) -> Result<Value, String> {
    let options = JsonCompileOptions {
        whitespace_pattern: Some(WHITE_SPACE.into()),
        ..JsonCompileOptions::default()
    };
    let mut schema = document(schema)?;
    if schema.is_object() {
        options.apply_to(&mut schema);
    }
    Ok(schema)
}

/// An error in one line, as much of it as is of use. Places in the crate's code are of none, nor in
/// a grammar that no client has written.
fn message(error: &str) -> String {
    // What follows an option of the crate nobody can set.
    let places = ["\n<backtrace>", " Enable 'coerce_one_of'"];
    let ends = places.iter().filter_map(|place| error.find(place));
    let error = &error[..ends.min().unwrap_or(error.len())];
    let error = error.strip_prefix("panic").map_or(error.into(), |why| {
        format!("the schema cannot be read{why}")
    });
    let error = match error
        .strip_prefix("at ")
        .and_then(|rest| rest.split_once("): "))
    {
        Some((place, rest)) if place.chars().all(|c| c.is_ascii_digit() || c == '(') => rest,
        _ => &error,
    };
    let of_grammar = |line: &&str| {
        let number = line
            .split_once(" | ")
            .map(|(number, _)| number.trim_start());
        number.is_some_and(|number| number.parse::<usize>().is_ok())
    };
    let lines = error.lines().take_while(|line| !of_grammar(line));
    let words: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
    let words = words.join(" ");
    let line = words.chars().filter(|c| !c.is_control());
    line.take(MAX_MESSAGE).collect()
}

struct Ruled(Matcher);

impl fmt::Debug for Ruled {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Ruled").finish_non_exhaustive()
    }
}

impl Constraint for Ruled {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        let allowed = self.0.compute_mask_or_eos()?;
        for (word, allowed) in mask.iter_mut().zip(allowed.as_slice()) {
            *word = *allowed;
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        // Nothing but an end can come then.
        if !self.0.is_stopped() {
            self.0.consume_token(token)?;
        }
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self(self.0.clone()))
    }
}

/// A constraint of what comes after reasoning. The reasoning is text, and does not end the answer.
#[derive(Clone, Debug)]
struct AfterReasoning {
    answer: Box<dyn Constraint>,
    /// Tokens that are text.
    text: Arc<[u32]>,
    /// The token that ends the reasoning, until it has come.
    end: Option<u32>,
}

impl Constraint for AfterReasoning {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        let Some(end) = self.end else {
            return self.answer.allow(mask);
        };
        mask.copy_from_slice(&self.text);
        mask[end as usize / 32] |= 1 << (end % 32);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        match self.end {
            None => self.answer.accept(token)?,
            Some(end) if token == end => self.end = None,
            Some(_) => (),
        }
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
impl Grammars {
    /// Those of a tokenizer in which a token stands for the mark of calls.
    pub(crate) fn marked(loaded: &Loaded, mark: u32) -> Self {
        let mark = Some(mark);
        Self {
            mark,
            ..Self::new(loaded)
        }
    }
}

#[cfg(test)]
#[path = "grammar_tests.rs"]
pub(crate) mod tests;
