//! Continues a prompt with a DeepSeek-V4 checkpoint, streaming the text, or chats at a terminal.
//!
//! Without arguments it takes the small trained checkpoint that comes with the repository.
//! `docs/generate.md` describes the options and the commands of the chat.

mod answer;
mod generator;
mod options;
mod page;
mod prompt;

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use burn_ds4_ops::device::DeviceSpec;
use ds4_model::generate::{EngineConfig, GenerateConfig};
use ds4_model::model::Model;
use ds4_model::pipeline::Pipeline;
use serde_json::json;

pub use answer::{Answer, Figures, Finish, Part, Reader, Said};
pub use generator::{Failure, Generator};
pub use options::{ModelOptions, Options};
pub use page::Page;
use prompt::Prompt;

use crate::shared::load_bar::LoadBar;
use crate::shared::place::Place;
use crate::shared::{Head, load_options, note};
#[cfg(feature = "protocols")]
use crate::{
    chat,
    conversation::{Encoding, user},
};

/// Tokens of the prompt that a warm-up has, at most: a longer one takes hardly any other kernels.
const WARM_UP_PROMPT: usize = 64;
/// Pieces of text after which a warm-up has launched, recorded and replayed a step.
const WARM_UP_PIECES: usize = 8;

/// Continues a prompt, or chats.
///
/// # Errors
///
/// If the options cannot be used, or the device fails.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    start(&options.model, Some(options))
}

/// Chats at the terminal.
///
/// # Errors
///
/// As [`run`].
#[cfg(feature = "protocols")]
pub fn run_chat(options: &ModelOptions) -> Result<(), Box<dyn Error>> {
    start(options, None)
}

/// Begins with a prompt, or with a chat.
fn start(args: &ModelOptions, given: Option<&Options>) -> Result<(), Box<dyn Error>> {
    let place = args.place.place();
    let spec = place.device();
    // What is wrong with the arguments is told before anything is loaded.
    args.config(GenerateConfig::default()).validate()?;
    args.drafts.check()?;
    let drafts = args.drafts.is_wanted();
    if args.draft_head == Head::Flash && !drafts {
        return Err("--draft-head flash needs drafts, --draft-tokens 1 to 8".into());
    }
    let flash = args.head == Head::Flash || args.draft_head == Head::Flash;
    args.flash
        .check(flash, "--head flash or --draft-head flash")?;
    let on = place.devices.init(1, args.ctx.map(|ctx| ctx as usize))?;
    let prompt = given.map_or(Ok(Prompt::Chat), Prompt::of)?;
    #[cfg(feature = "protocols")]
    if prompt != Prompt::Chat && !given.is_some_and(Options::is_chat) {
        let options = [
            ("--think", args.think.is_some()),
            ("--encoding", args.encoding.is_some()),
        ];
        if let Some((option, _)) = options.iter().find(|(_, given)| *given) {
            return Err(format!("{option} needs --chat").into());
        }
    }

    let started = Instant::now();
    let options = load_options(spec, place.dtype, drafts);
    let options = args.rounding.apply(options);
    let bar = LoadBar::default();
    let mut pipeline = Pipeline::open_with_progress(&args.model, &options, &on, bar)?;
    if flash {
        choose_heads(args, &mut pipeline.model)?;
    }
    let setup = Setup {
        args,
        given,
        config: GenerateConfig {
            drafts: args.drafts.drafts(&pipeline.model)?,
            ..args.config(pipeline.defaults.clone())
        },
        pipeline: &pipeline,
        place,
        loaded: started.elapsed(),
    };
    match prompt {
        Prompt::Text(prompt) => setup.answer(&prompt),
        #[cfg(feature = "protocols")]
        Prompt::Chat if given.is_none() || setup.conversation("").is_ok() => setup.chat(),
        // The tokenizer does not have what separates the turns of a conversation.
        Prompt::Chat => setup.answer(prompt::DEFAULT),
    }
}

/// All that an answer takes.
struct Setup<'a> {
    args: &'a ModelOptions,
    given: Option<&'a Options>,
    pipeline: &'a Pipeline,
    config: GenerateConfig,
    place: Place,
    loaded: Duration,
}

impl Setup<'_> {
    #[cfg(feature = "protocols")]
    fn encoding(&self) -> Encoding {
        let default = || Encoding::of(self.pipeline.model.config());
        self.args.encoding.unwrap_or_else(default)
    }

    /// The ids of a conversation of one message.
    #[cfg(feature = "protocols")]
    fn conversation(&self, message: &str) -> Result<Vec<u32>, Box<dyn Error>> {
        let conversation = self.args.conversation(vec![user(message)]);
        let tokenizer = &self.pipeline.tokenizer;
        Ok(self.encoding().encode(&conversation, tokenizer)?)
    }

    #[cfg(not(feature = "protocols"))]
    fn conversation(&self, message: &str) -> Result<Vec<u32>, Box<dyn Error>> {
        Ok(self.pipeline.encode(message)?)
    }

    fn context(&self) -> Option<usize> {
        self.args.ctx.map(|ctx| ctx as usize)
    }

    #[cfg(feature = "protocols")]
    fn chat(&self) -> Result<(), Box<dyn Error>> {
        let Self { args, pipeline, .. } = self;
        let longest = pipeline.model.config().max_position_embeddings;
        let context = self
            .context()
            .map_or(longest, |context| context.min(longest));
        let default = chat::default_tokens(context);
        let config = GenerateConfig {
            max_new_tokens: args.tokens.unwrap_or(default),
            ..self.config.clone()
        };
        self.warm_up(&self.conversation("")?)?;
        let engine = EngineConfig {
            prefix_bytes: chat::KEPT_BYTES,
            exact_prefix: args.exact_prefix,
            ..EngineConfig::default()
        };
        let generator = Generator::new(pipeline, config, self.context(), engine)?;
        writeln!(io::stdout(), "[{}]", self.place)?;
        chat::at_terminal(generator, self.encoding(), args.think)
    }

    /// Continues one prompt.
    fn answer(&self, prompt: &str) -> Result<(), Box<dyn Error>> {
        let Self { args, pipeline, .. } = self;
        let is_chat = self.given.is_some_and(Options::is_chat);
        let (ids, thinking) = match is_chat {
            true => (self.conversation(prompt)?, Some(args.thinks())),
            false => (pipeline.encode(prompt)?, None),
        };
        let warmed_up = self.warm_up(&ids)?;
        let engine = EngineConfig {
            context: Some(self.config.context_for(ids.len())),
            ..EngineConfig::default()
        };
        let config = self.config.clone();
        let mut generator = Generator::new(pipeline, config, self.context(), engine)?;
        let mut out = io::stdout().lock();
        let answer = if self.given.is_some_and(|given| given.json) {
            let answer = generator.generate(&ids, thinking, 0, &mut Patient)?;
            writeln!(out, "{}", self.report(&ids, &answer))?;
            answer
        } else {
            // An answer in a chat does not follow the prompt.
            let before = if is_chat { "" } else { prompt };
            let dims = out.is_terminal();
            let mut page = Page::new(&mut out, before, dims);
            let answer = generator.generate(&ids, thinking, 0, &mut page)?;
            page.end()?;
            answer
        };
        let drafts = match self.config.drafts {
            0 => String::new(),
            _ => answer.figures.drafts(),
        };
        let warmed_up = warmed_up.map_or_else(String::new, |time| {
            format!(", kernels compiled in {:.2} s", time.as_secs_f64())
        });
        note(format_args!(
            "[{} tokens, {:.1} tokens/s{drafts}; prompt {} tokens in {:.2} s, loaded in {:.2} \
             s{warmed_up}; {}; {}]",
            answer.ids.len(),
            answer.figures.rate(),
            ids.len(),
            answer.figures.prompt_seconds,
            self.loaded.as_secs_f64(),
            answer.finish.describe(),
            self.place,
        ));
        Ok(())
    }

    fn report(&self, prompt: &[u32], answer: &Answer) -> serde_json::Value {
        let figures = &answer.figures;
        let mut report = json!({
            "prompt_ids": prompt,
            "ids": answer.ids,
            "text": answer.said.content,
            "finish_reason": answer.finish,
            "figures": figures,
        });
        if let Some(reasoning) = &answer.said.reasoning {
            report["reasoning"] = json!(reasoning);
        }
        for (name, value) in [
            ("tokens_per_second", json!(figures.rate())),
            ("load_seconds", json!(self.loaded.as_secs_f64())),
            ("device", json!(self.place.devices.to_string())),
            ("dtype", json!(self.place.dtype_name())),
        ] {
            report["figures"][name] = value;
        }
        report
    }

    /// Begins the same generation where kernels are compiled at their first use, so that the rates
    /// do not include compilation.
    fn warm_up(&self, prompt: &[u32]) -> Result<Option<Duration>, Box<dyn Error>> {
        if self.place.device() == DeviceSpec::Flex {
            return Ok(None);
        }
        let started = Instant::now();
        // Caches of other sizes may have other kernels.
        let context = Some(self.config.context_for(prompt.len()));
        let prompt = &prompt[..prompt.len().min(WARM_UP_PROMPT)];
        let config = GenerateConfig {
            context,
            ..self.config.clone()
        };
        let mut pieces = 0;
        let mut generation = self.pipeline.generate(config, prompt)?;
        generation.stream(|_| {
            pieces += 1;
            match pieces < WARM_UP_PIECES {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        })?;
        Ok(Some(started.elapsed()))
    }
}

/// Waits for the end.
struct Patient;

impl Reader for Patient {
    fn read(&mut self, _: &Part) -> io::Result<()> {
        Ok(())
    }
}

/// Puts the flash head where the arguments ask for it.
fn choose_heads(args: &ModelOptions, model: &mut Model) -> Result<(), Box<dyn Error>> {
    let head = args.flash.head(&args.model, model)?;
    if args.head == Head::Flash {
        let (probes, clusters) = (head.probes(), head.head().clusters());
        let kind = match probes == clusters {
            true => "exact",
            false => "approximate",
        };
        note(format_args!(
            "[{kind} flash head: {probes} of {clusters} clusters are probed for a token]"
        ));
        model.flash_head = Some(head.clone());
    }
    if args.draft_head == Head::Flash {
        model.set_draft_head(Some(head));
    }
    Ok(())
}
