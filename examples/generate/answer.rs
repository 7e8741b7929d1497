//! What the model says to a prompt, while it is generated.

use std::error::Error;
use std::io;
use std::time::Instant;

use ds4_model::checkpoint::LoadProgress;
use ds4_model::generate::{Completion, CompletionPart, Engine, FinishReason, RequestId};
use serde::Serialize;

use crate::shared::answer_text::AnswerText;
use crate::shared::load_bar::LoadBar;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    EndOfSequence,
    StopToken,
    StopString,
    Length,
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
    pub prompt_tokens: usize,
    /// Until the first token.
    pub prompt_seconds: f64,
    pub tokens: usize,
    /// From the first token on.
    pub seconds: f64,
    pub drafted: usize,
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
    pub completion: Completion,
    pub finish: Finish,
    pub figures: Figures,
}

impl Answer {
    /// No token of an answer to so many.
    pub fn empty(prompt_tokens: usize) -> Self {
        Self {
            ids: Vec::new(),
            completion: Completion::default(),
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
    fn read(&mut self, part: &CompletionPart) -> io::Result<()>;

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
pub fn answer(
    engine: &mut Engine,
    request: RequestId,
    mut text: AnswerText,
    reader: &mut dyn Reader,
) -> Result<Answer, Box<dyn Error>> {
    let mut completion = Completion::default();
    let mut tell = |reader: &mut dyn Reader, parts: Vec<CompletionPart>| {
        let result = parts.iter().try_for_each(|part| reader.read(part));
        completion.extend(parts);
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
        completion,
        finish,
        figures,
    })
}
