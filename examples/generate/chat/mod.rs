//! A conversation at a terminal.

mod command;
mod saved;
mod terminal;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::io::{self, Write};

use ds4_model::generate::{ChatOptions, CompletionPart, Message};

use crate::answer::{Answer, Figures, Finish, Reader};
use crate::generator::{Failure, Generator};
use crate::page::Page;
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

/// Chats at the terminal until it ends.
///
/// # Errors
///
/// If the device fails, or the terminal.
pub fn run(generator: Generator, options: ChatOptions) -> Result<(), Box<dyn Error>> {
    let interrupts = Interrupts::new()?;
    let mut model = Model {
        generator,
        interrupts,
    };
    let mut chat = Chat::new(&mut model, io::stdout(), options);
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
        messages: &[Message],
        options: &ChatOptions,
        attempt: u64,
        reader: &mut dyn FnMut(&CompletionPart) -> io::Result<()>,
    ) -> Result<Answer, Failure>;
}

/// The model, which can be interrupted.
struct Model<'a> {
    generator: Generator<'a>,
    interrupts: Interrupts,
}

struct Interruptible<'a> {
    reader: &'a mut dyn FnMut(&CompletionPart) -> io::Result<()>,
    interrupts: &'a Interrupts,
}

impl Reader for Interruptible<'_> {
    fn read(&mut self, part: &CompletionPart) -> io::Result<()> {
        (self.reader)(part)
    }

    fn is_interrupted(&mut self) -> bool {
        self.interrupts.take()
    }
}

impl Answers for Model<'_> {
    fn answer(
        &mut self,
        messages: &[Message],
        options: &ChatOptions,
        attempt: u64,
        reader: &mut dyn FnMut(&CompletionPart) -> io::Result<()>,
    ) -> Result<Answer, Failure> {
        let prompt = self.generator.encode(messages, options)?;
        let interrupts = &self.interrupts;
        let mut reader = Interruptible { reader, interrupts };
        let thinking = Some(options.thinking);
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
    options: ChatOptions,
    system: Option<String>,
    /// Messages of the user and answers, in turn.
    messages: Vec<Message>,
    /// How often the last message was answered before.
    attempt: u64,
    figures: Vec<Figures>,
}

impl<'a, A: Answers, W: Write> Chat<'a, A, W> {
    fn new(answers: &'a mut A, out: W, options: ChatOptions) -> Self {
        Self {
            answers,
            out,
            dims: false,
            options,
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
            Command::Think(effort) => {
                self.options.thinking = effort.is_some();
                self.options.effort = effort.unwrap_or_default();
            }
            Command::Reset => {
                self.messages.clear();
                self.figures.clear();
            }
            Command::Save(path) => match saved::save(path.as_ref(), &self.conversation()) {
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
    fn conversation(&self) -> Vec<Message> {
        let system = self.system.iter().map(Message::system);
        system.chain(self.messages.iter().cloned()).collect()
    }

    fn say(&mut self, text: String) -> Result<(), Box<dyn Error>> {
        self.messages.push(Message::user(text));
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
        let messages = self.conversation();
        let mut page = Page::new(&mut self.out, "", self.dims);
        let mut read = |part: &CompletionPart| page.read(part);
        let answered = self
            .answers
            .answer(&messages, &self.options, self.attempt, &mut read);
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
            completion,
            finish,
            figures,
            ..
        } = answer;
        let reasoning = completion.reasoning.as_deref().unwrap_or_default();
        let is_empty = [reasoning, &completion.content]
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
            self.messages.push(completion.into());
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
