//! A conversation at a terminal.

mod command;
mod saved;
mod terminal;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::io::{self, Write};

use crate::conversation::{Conversation, Effort, Encoding, InputMessage, assistant, system, user};
use crate::generate::{Answer, Failure, Figures, Finish, Generator, Page, Part, Reader};
use command::{Command, HELP};
use terminal::{Interrupts, Terminal};

/// Bytes that are kept of the turns, so that they need not be processed again.
pub const KEPT_BYTES: usize = 1 << 30;

/// Tokens of an answer where nobody says how many, at most: a text that does not end would fill the
/// context.
const MOST_TOKENS: usize = 4096;

/// How many tokens an answer has at most, where nobody says, with a context of so many.
pub fn default_tokens(context: usize) -> usize {
    (context / 4).clamp(1, MOST_TOKENS)
}

/// A conversation of these messages, in which the model thinks so much, if at all.
pub fn conversation(messages: Vec<InputMessage>, effort: Option<Effort>) -> Conversation {
    Conversation {
        messages,
        thinking_mode: effort.is_some(),
        reasoning_effort: effort.map(Into::into),
        ..Conversation::default()
    }
}

/// Chats at the terminal until it ends.
///
/// # Errors
///
/// If the device fails, or the terminal.
pub fn at_terminal(
    generator: Generator,
    encoding: Encoding,
    effort: Option<Effort>,
) -> Result<(), Box<dyn Error>> {
    let mut model = Model {
        generator,
        encoding,
        interrupts: Interrupts::new()?,
    };
    let mut chat = Chat::new(&mut model, io::stdout(), effort);
    chat.dims = true;
    chat.run(&mut Terminal::new()?)
}

/// What comes from the keyboard.
#[derive(Clone, Debug)]
pub enum Input {
    /// A line.
    Line(String),
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D, or the end of the terminal.
    End,
}

/// Where lines come from.
pub trait Lines {
    /// The next one.
    fn read(&mut self) -> Result<Input, Box<dyn Error>>;
}

/// Who answers.
pub trait Answers {
    /// Answers a conversation. The first attempt is number 0.
    fn answer(
        &mut self,
        messages: &[InputMessage],
        effort: Option<Effort>,
        attempt: u64,
        reader: &mut dyn FnMut(&Part) -> io::Result<()>,
    ) -> Result<Answer, Failure>;
}

/// The model, which can be interrupted.
struct Model<'a> {
    generator: Generator<'a>,
    encoding: Encoding,
    interrupts: Interrupts,
}

struct Interruptible<'a> {
    reader: &'a mut dyn FnMut(&Part) -> io::Result<()>,
    interrupts: &'a Interrupts,
}

impl Reader for Interruptible<'_> {
    fn read(&mut self, part: &Part) -> io::Result<()> {
        (self.reader)(part)
    }

    fn is_interrupted(&mut self) -> bool {
        self.interrupts.take()
    }
}

impl Answers for Model<'_> {
    fn answer(
        &mut self,
        messages: &[InputMessage],
        effort: Option<Effort>,
        attempt: u64,
        reader: &mut dyn FnMut(&Part) -> io::Result<()>,
    ) -> Result<Answer, Failure> {
        let conversation = conversation(messages.to_vec(), effort);
        let prompt = self.generator.encode(&conversation, self.encoding)?;
        let interrupts = &self.interrupts;
        let mut reader = Interruptible { reader, interrupts };
        let thinking = Some(effort.is_some());
        let answer = self
            .generator
            .generate(&prompt, thinking, attempt, &mut reader);
        // One that comes too late has nothing to do with the next answer.
        interrupts.take();
        answer
    }
}

/// A conversation.
struct Chat<'a, A, W> {
    answers: &'a mut A,
    out: W,
    /// Whether reasoning is written dimmed.
    dims: bool,
    effort: Option<Effort>,
    system: Option<String>,
    /// Messages of the user and answers, in turn.
    messages: Vec<InputMessage>,
    /// How often the last message was answered before.
    attempt: u64,
    figures: Vec<Figures>,
}

impl<'a, A: Answers, W: Write> Chat<'a, A, W> {
    fn new(answers: &'a mut A, out: W, effort: Option<Effort>) -> Self {
        Self {
            answers,
            out,
            dims: false,
            effort,
            system: None,
            messages: Vec::new(),
            attempt: 0,
            figures: Vec::new(),
        }
    }

    fn run(&mut self, lines: &mut impl Lines) -> Result<(), Box<dyn Error>> {
        writeln!(self.out, "[/help lists the commands, Ctrl-D ends the chat]")?;
        loop {
            let line = match lines.read()? {
                Input::Line(line) => line,
                Input::Interrupted => {
                    writeln!(self.out, "[Ctrl-D ends the chat]")?;
                    continue;
                }
                Input::End => return Ok(()),
            };
            match Command::parse(&line) {
                Ok(None) => (),
                Ok(Some(Command::Exit)) => return Ok(()),
                Ok(Some(command)) => self.obey(command)?,
                Err(error) => writeln!(self.out, "error: {error}")?,
            }
        }
    }

    fn obey(&mut self, command: Command) -> Result<(), Box<dyn Error>> {
        match command {
            Command::Say(text) => return self.say(text),
            Command::Regenerate => return self.regenerate(),
            Command::System(text) => self.system = text,
            Command::Think(effort) => self.effort = effort,
            Command::Reset => {
                self.messages.clear();
                self.figures.clear();
            }
            Command::Save(path) => match saved::save(path.as_ref(), &self.all()) {
                Ok(()) => writeln!(self.out, "[saved to {path}]")?,
                Err(error) => writeln!(self.out, "error: {path}: {error}")?,
            },
            Command::Stats => self.write_stats()?,
            Command::Help => writeln!(self.out, "{HELP}")?,
            Command::Exit => (),
        }
        Ok(())
    }

    /// All messages, with the instructions.
    fn all(&self) -> Vec<InputMessage> {
        let system = self.system.iter().map(|text| system(text));
        system.chain(self.messages.iter().cloned()).collect()
    }

    fn say(&mut self, text: String) -> Result<(), Box<dyn Error>> {
        self.messages.push(user(&text));
        self.attempt = 0;
        if !self.answer()? {
            self.messages.pop();
        }
        Ok(())
    }

    fn regenerate(&mut self) -> Result<(), Box<dyn Error>> {
        let Some(before) = self.messages.pop() else {
            writeln!(self.out, "error: there is no answer yet")?;
            return Ok(());
        };
        self.attempt += 1;
        if !self.answer()? {
            self.messages.push(before);
        }
        Ok(())
    }

    /// Answers the last message, unless nothing comes of it.
    fn answer(&mut self) -> Result<bool, Box<dyn Error>> {
        let messages = self.all();
        let mut page = Page::new(&mut self.out, "", self.dims);
        let mut read = |part: &Part| page.read(part);
        let answered = self
            .answers
            .answer(&messages, self.effort, self.attempt, &mut read);
        if !matches!(answered, Err(Failure::Refused(_))) {
            page.end()?;
        }
        let answer = match answered {
            Ok(answer) => answer,
            Err(Failure::Refused(error)) => {
                writeln!(self.out, "error: {error}")?;
                return Ok(false);
            }
            Err(Failure::Lost(error)) => return Err(error),
        };
        let Answer {
            said,
            finish,
            figures,
            ..
        } = answer;
        let reasoning = said.reasoning.as_deref().unwrap_or_default();
        let is_empty = [reasoning, &said.content]
            .iter()
            .all(|text| text.is_empty());
        let is_dropped = is_empty && finish == Finish::Interrupted;
        let unchanged = ["", ", nothing changes"][usize::from(is_dropped)];
        let (tokens, rate) = (figures.tokens, figures.rate());
        let (reason, drafts) = (finish.describe(), figures.drafts());
        writeln!(
            self.out,
            "[{tokens} tokens, {rate:.1} tokens/s{drafts}; {reason}{unchanged}]"
        )?;
        self.figures.push(figures);
        if !is_dropped {
            self.messages.push(assistant(said.content, said.reasoning));
        }
        Ok(!is_dropped)
    }

    fn write_stats(&mut self) -> io::Result<()> {
        let Some(last) = self.figures.last() else {
            return writeln!(self.out, "[nothing has been answered yet]");
        };
        let tokens: usize = self.figures.iter().map(|figures| figures.tokens).sum();
        writeln!(
            self.out,
            "[last answer: prompt {} tokens in {:.2} s, {} tokens, {:.1} tokens/s{}]\n\
             [{} messages, answers of {} tokens in all]",
            last.prompt_tokens,
            last.prompt_seconds,
            last.tokens,
            last.rate(),
            last.drafts(),
            self.messages.len(),
            tokens,
        )
    }
}
