//! What the model says to a prompt, while it is generated.

use std::error::Error;
use std::io;
use std::time::Instant;

use ds4_model::checkpoint::LoadProgress;
use ds4_model::generate::{Engine, FinishReason, GenerateError, RequestId, TextTokenizer};
use serde::Serialize;

use crate::shared::answer_text::PlainText;
use crate::shared::load_bar::LoadBar;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The next piece of the reasoning.
    Reasoning(String),
    /// The next piece of the text.
    Content(String),
}

/// What an answer has said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// The reasoning; `None` where there was to be none.
    pub reasoning: Option<String>,
    /// The text.
    pub content: String,
}

impl Extend<Part> for Said {
    fn extend<T: IntoIterator<Item = Part>>(&mut self, parts: T) {
        for part in parts {
            match part {
                Part::Reasoning(text) => self.reasoning.get_or_insert_default().push_str(&text),
                Part::Content(text) => self.content.push_str(&text),
            }
        }
    }
}

/// The text of an answer, from its tokens.
#[derive(Debug)]
pub(crate) enum AnswerText {
    /// That of a text to continue.
    Plain(PlainText),
    /// That of a conversation, and whether a stop string has ended it.
    #[cfg(feature = "protocols")]
    Chat(Box<crate::conversation::AnswerParser>, bool),
}

impl AnswerText {
    /// Of a conversation, if it is known whether the model is to think.
    pub fn new(
        tokenizer: &TextTokenizer,
        thinking: Option<bool>,
        stops: &[String],
    ) -> Result<Self, GenerateError> {
        // What is wrong with a stop string is wrong in a conversation, too.
        let plain = PlainText::new(tokenizer, stops)?;
        match thinking {
            #[cfg(feature = "protocols")]
            Some(thinking) => {
                use deepseek_recipe::stream::{ParsingOptions, ThinkingInitialStage};

                let options = ParsingOptions {
                    parse_tool_calls: false,
                    thinking_initial_stage: thinking
                        .then_some(ThinkingInitialStage::ReasoningStart),
                    stop_sequences: stops.to_vec(),
                    ..ParsingOptions::default()
                };
                let parser = crate::conversation::AnswerParser::new(tokenizer, options);
                Ok(Self::Chat(Box::new(parser), false))
            }
            _ => Ok(Self::Plain(plain)),
        }
    }

    fn push(&mut self, id: u32) -> Result<Vec<Part>, GenerateError> {
        match self {
            Self::Plain(text) => Ok(content(text.push(id)?)),
            #[cfg(feature = "protocols")]
            Self::Chat(parser, is_stopped) => Ok(parts(parser.push(id, None), is_stopped)),
        }
    }

    fn finish(&mut self) -> Vec<Part> {
        match self {
            Self::Plain(text) => content(text.finish()),
            #[cfg(feature = "protocols")]
            Self::Chat(parser, is_stopped) => {
                let reason = deepseek_recipe::stream::InferenceFinishReason::Stop;
                parts(parser.finish(reason), is_stopped)
            }
        }
    }

    fn is_stopped(&self) -> bool {
        match self {
            Self::Plain(text) => text.is_stopped(),
            #[cfg(feature = "protocols")]
            Self::Chat(_, is_stopped) => *is_stopped,
        }
    }
}

fn content(text: String) -> Vec<Part> {
    Vec::from_iter((!text.is_empty()).then_some(Part::Content(text)))
}

#[cfg(feature = "protocols")]
fn parts(chunks: Vec<deepseek_recipe::stream::OutputChunk>, is_stopped: &mut bool) -> Vec<Part> {
    use deepseek_recipe::stream::{FinishReason, OutputChunk};

    let parts = chunks.into_iter().filter_map(|chunk| match chunk {
        OutputChunk::Reasoning { content, .. } => Some(Part::Reasoning(content)),
        OutputChunk::Content { content, .. } => Some(Part::Content(content)),
        OutputChunk::Finish { finish_reason, .. } => {
            *is_stopped |= finish_reason == FinishReason::StopSequence;
            None
        }
        _ => None,
    });
    parts.collect()
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// At the end of the sequence.
    EndOfSequence,
    /// At a token that ends texts.
    StopToken,
    /// Before a text that ends it.
    StopString,
    /// It has as many tokens as are wanted.
    Length,
    /// The context is full.
    ContextFull,
    /// Somebody has stopped it.
    Interrupted,
}

impl From<FinishReason> for Finish {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::EndOfSequence => Self::EndOfSequence,
            FinishReason::StopToken => Self::StopToken,
            FinishReason::StopString => Self::StopString,
            FinishReason::Length => Self::Length,
            FinishReason::ContextFull => Self::ContextFull,
        }
    }
}

impl Finish {
    /// In words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::EndOfSequence => "the text has ended",
            Self::StopToken => "stopped at a token",
            Self::StopString => "stopped at a text",
            Self::Length => "as many tokens as wanted",
            Self::ContextFull => "the context is full",
            Self::Interrupted => "interrupted",
        }
    }
}

/// How long an answer took.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Until the first token.
    pub prompt_seconds: f64,
    /// Tokens of the answer.
    pub tokens: usize,
    /// From the first token on.
    pub seconds: f64,
    /// Drafts made.
    pub drafted: usize,
    /// Those of them that were accepted.
    pub accepted: usize,
}

impl Figures {
    /// Tokens a second. The first token comes with the prompt.
    pub fn rate(&self) -> f64 {
        match self.seconds > 0.0 {
            true => self.tokens.saturating_sub(1) as f64 / self.seconds,
            false => 0.0,
        }
    }

    /// How many drafts were accepted, where there were any to accept.
    pub fn drafts(&self) -> String {
        match self.drafted {
            0 => String::new(),
            drafted => format!(
                ", drafts {drafted} accepted {} ({:.1} %)",
                self.accepted,
                100.0 * self.accepted as f64 / drafted as f64
            ),
        }
    }
}

/// An answer that has ended.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its tokens, without one that ended it.
    pub ids: Vec<u32>,
    /// Its text. All is content where the prompt was no conversation.
    pub said: Said,
    /// Why it ended.
    pub finish: Finish,
    /// How long it took.
    pub figures: Figures,
}

impl Answer {
    /// No token of an answer to so many.
    pub fn empty(prompt_tokens: usize) -> Self {
        Self {
            ids: Vec::new(),
            said: Said::default(),
            finish: Finish::Length,
            figures: Figures {
                prompt_tokens,
                ..Figures::default()
            },
        }
    }
}

/// Who reads an answer while it comes.
pub trait Reader {
    /// Takes the next part.
    fn read(&mut self, part: &Part) -> io::Result<()>;

    /// Whether the rest is not wanted any more.
    fn is_interrupted(&mut self) -> bool {
        false
    }
}

/// What an engine says to a request that was added to it, the only one that it has.
///
/// # Errors
///
/// If the device fails, or the reader.
pub(crate) fn answer(
    engine: &mut Engine,
    request: RequestId,
    mut text: AnswerText,
    reader: &mut dyn Reader,
) -> Result<Answer, Box<dyn Error>> {
    let mut said = Said::default();
    let mut tell = |reader: &mut dyn Reader, parts: Vec<Part>| {
        let result = parts.iter().try_for_each(|part| reader.read(part));
        said.extend(parts);
        result
    };
    let prompt = engine
        .progress(request)
        .map_or(0, |progress| progress.prompt);
    let before = engine.stats().clone();
    let (mut ids, started) = (Vec::new(), Instant::now());
    let mut first: Option<Instant> = None;
    let mut bar = LoadBar::default().of_prompt();
    let mut finish = 'steps: loop {
        for output in engine.step()? {
            first.get_or_insert_with(Instant::now);
            bar.finish();
            let (token, finish) = (output.token?, output.finish.map(Finish::from));
            let ends = [Finish::EndOfSequence, Finish::StopToken].map(Some);
            if !ends.contains(&finish) {
                ids.push(token);
                tell(reader, text.push(token)?)?;
            }
            if text.is_stopped() {
                break 'steps Finish::StopString;
            }
            if let Some(finish) = finish {
                break 'steps finish;
            }
        }
        if reader.is_interrupted() {
            break Finish::Interrupted;
        }
        if let (None, Some(progress)) = (first, engine.progress(request)) {
            bar.update(progress.processed as u64, progress.prompt as u64);
        }
    };
    bar.finish();
    if engine.progress(request).is_some() {
        engine.abort(request)?;
    }
    tell(reader, text.finish())?;
    if text.is_stopped() {
        finish = Finish::StopString;
    }
    let ended = Instant::now();
    let first = first.unwrap_or(ended);
    let figures = Figures {
        prompt_tokens: prompt,
        prompt_seconds: (first - started).as_secs_f64(),
        tokens: ids.len(),
        seconds: (ended - first).as_secs_f64(),
        drafted: engine.stats().drafted - before.drafted,
        accepted: engine.stats().accepted - before.accepted,
    };
    Ok(Answer {
        ids,
        said,
        finish,
        figures,
    })
}
