//! The thread that owns the model: it decodes the texts of all requests together.

use std::collections::HashMap;
use std::error::Error;
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use burn_ds4_ops::device::DeviceSpec;
use ds4_model::config::ModelConfig;
use ds4_model::generate::{
    Engine, FinishReason, GenerateConfig, GenerateError, Output, Request, RequestId, TextTokenizer,
    TokenLogProbs,
};
use ds4_model::pipeline::Pipeline;
use tokio::sync::{OwnedSemaphorePermit, mpsc as async_mpsc, oneshot};

use crate::conversation::Encoding;
use crate::serve::grammar;
use crate::serve::metrics::{Metrics, StepFigures};
use crate::serve::options::Options;
use crate::serve::startup::Startup;
use crate::serve::warming::{Warming, wait};
use crate::shared::load_bar::LoadBar;
use crate::shared::load_options;
use crate::shared::place::Place;

/// Tokens that whoever reads an answer may be behind the engine; further behind, the text is given
/// up.
const MOST_BEHIND: usize = 4096;

/// An error of the thread.
pub type Failure = Box<dyn Error + Send + Sync>;

/// A text to be continued.
#[derive(Debug)]
pub struct Job {
    /// What is asked of the engine.
    pub request: Request,
    /// Where the tokens go. The text is given up when nobody listens any more.
    pub events: async_mpsc::Sender<Event>,
    /// When the request came.
    pub created: Instant,
    /// When the text is given up, whether somebody reads or not.
    pub deadline: Instant,
    /// Its place among the texts that may run and wait.
    pub permit: OwnedSemaphorePermit,
}

/// The next token of a text, or why there is none.
pub type Event = Result<Token, NoToken>;

/// Why a text ends before its time.
#[derive(Debug)]
pub enum NoToken {
    /// The engine cannot go on with it.
    Failed(GenerateError),
    /// It has taken too long.
    Late,
    /// Nobody reads what there is.
    Behind,
}

/// Where the tokens of a text go and come from.
pub fn events() -> (async_mpsc::Sender<Event>, async_mpsc::Receiver<Event>) {
    // One place is for why there are no more.
    async_mpsc::channel(MOST_BEHIND + 1)
}

/// A token of a text.
#[derive(Debug)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its log-probabilities, if they are wanted.
    pub log_probs: Option<TokenLogProbs>,
    /// Why it was the last one.
    pub finish: Option<FinishReason>,
    /// Tokens of the prompt that were taken from what was kept of another one.
    pub cached: usize,
}

/// What is known of the model once it is loaded.
#[derive(Debug)]
pub struct Loaded {
    /// Its tokenizer.
    pub tokenizer: TextTokenizer,
    /// Its configuration.
    pub config: ModelConfig,
    /// How it is meant to generate.
    pub defaults: GenerateConfig,
    /// Where it runs.
    pub place: Place,
    /// Drafts of a step.
    pub drafts: usize,
    /// What its chat prompts are like.
    pub encoding: Encoding,
    /// Whether its kernels are compiled.
    pub startup: Arc<Startup>,
}

/// The running thread.
#[derive(Debug)]
pub struct EngineThread {
    /// What it has loaded.
    pub loaded: Loaded,
    /// Takes texts. The thread ends when this is dropped and all texts have ended.
    pub jobs: Sender<Job>,
    /// Resolves when the thread has ended, for whatever reason.
    pub ended: oneshot::Receiver<()>,
    /// What it ends with.
    pub thread: JoinHandle<Result<(), Failure>>,
}

impl EngineThread {
    /// Starts the thread, and waits until it has loaded the model.
    pub fn start(args: Options, metrics: Arc<Metrics>) -> Result<Self, Failure> {
        let (jobs, receiver) = mpsc::channel();
        let (loaded, is_loaded) = mpsc::sync_channel(1);
        let (running, ended) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("engine".into());
        let thread = thread.stack_size(grammar::STACK);
        let thread = thread.spawn(move || {
            // Dropped when the thread ends, also where it panics.
            let _running = running;
            run(&args, &loaded, &receiver, &metrics)
        })?;
        match is_loaded.recv() {
            Ok(loaded) => Ok(Self {
                loaded,
                jobs,
                ended,
                thread,
            }),
            Err(_) => Err(join(thread).err().unwrap_or_else(panicked)),
        }
    }
}

/// Waits for the thread.
pub fn join(thread: JoinHandle<Result<(), Failure>>) -> Result<(), Failure> {
    thread.join().unwrap_or_else(|_| Err(panicked()))
}

fn panicked() -> Failure {
    "the engine has panicked".into()
}

fn run(
    args: &Options,
    loaded: &SyncSender<Loaded>,
    jobs: &Receiver<Job>,
    metrics: &Metrics,
) -> Result<(), Failure> {
    let place = args.place.place();
    let context = args.ctx.map(|ctx| ctx as usize * usize::from(args.lanes));
    let devices = place.devices.init(args.lanes.into(), context)?;
    let options = load_options(place.device(), place.dtype, args.drafts.is_wanted());
    let options = args.rounding.apply(options);
    let bar = LoadBar::default();
    let pipeline = Pipeline::open_with_progress(&args.model, &options, &devices, bar)?;
    let config = args.engine(args.drafts.drafts(&pipeline.model)?);
    let startup = Arc::new(Startup::default());
    let engine = Engine::new(&pipeline.model, config.clone())?;
    if let Some(bytes) = engine.cache_limit() {
        tracing::info!(bytes, "caches of texts take no more");
    }
    let known = Loaded {
        tokenizer: pipeline.tokenizer.clone(),
        config: pipeline.model.config().clone(),
        defaults: pipeline.defaults.clone(),
        place,
        drafts: config.drafts,
        encoding: args
            .encoding
            .unwrap_or(Encoding::of(pipeline.model.config())),
        startup: startup.clone(),
    };
    let is_cold = !args.no_warm_up && known.place.device() != DeviceSpec::Flex;
    let warming = is_cold.then(|| Warming::new(&pipeline.model, &config, startup));
    // From here on the server listens.
    loaded.send(known)?;
    Ok(serve(engine, jobs, warming, metrics)?)
}

/// A text in the engine.
struct Text {
    events: async_mpsc::Sender<Event>,
    created: Instant,
    deadline: Instant,
    /// When its last token came.
    last: Option<Instant>,
    /// Tokens of its prompt, and those of them that are processed.
    prompt: usize,
    processed: usize,
    /// Tokens of its prompt that were taken from a kept text, once that is known.
    cached: usize,
    _permit: OwnedSemaphorePermit,
}

/// Steps while there are texts, and waits for some otherwise.
fn serve(
    mut engine: Engine,
    jobs: &Receiver<Job>,
    mut warming: Option<Warming<'_>>,
    metrics: &Metrics,
) -> Result<(), GenerateError> {
    let mut texts: HashMap<RequestId, Text> = HashMap::new();
    loop {
        if texts.is_empty() {
            metrics.load(&engine);
            match wait(jobs, &mut warming)? {
                Some(job) => add(job, &mut engine, &mut texts),
                None => return Ok(()),
            }
        }
        while let Ok(job) = jobs.try_recv() {
            add(job, &mut engine, &mut texts);
        }
        let started = Instant::now();
        give_up(&mut engine, &mut texts, started)?;
        metrics.load(&engine);

        let outputs = engine.step()?;
        // Who gets a token finds the figures of the step that made it.
        metrics.load(&engine);
        let mut figures = StepFigures {
            generated: outputs.iter().filter(|output| output.token.is_ok()).count(),
            ..StepFigures::default()
        };
        for output in &outputs {
            if let Some(text) = texts.get_mut(&output.request) {
                figures.cached += output.cached - text.cached;
                text.cached = output.cached;
                if output.token.is_err() {
                    // Perhaps before it began: no more of its prompt is processed.
                    text.prompt = text.processed;
                }
            }
        }
        for (id, text) in &mut texts {
            // A text that has ended is not known any more; its prompt was processed.
            let processed = engine.progress(*id).map_or(text.prompt, |p| p.processed);
            figures.prompt += processed - text.processed;
            text.processed = processed;
        }
        for id in hand_out(outputs, &mut texts, metrics) {
            // Some have ended in the same step.
            if engine.progress(id).is_some() {
                engine.abort(id)?;
            }
        }
        figures.time = started.elapsed();
        metrics.step(figures, engine.stats());
    }
}

fn add(job: Job, engine: &mut Engine, texts: &mut HashMap<RequestId, Text>) {
    let prompt = job.request.prompt.len();
    match engine.add(job.request) {
        Ok(id) => {
            let text = Text {
                events: job.events,
                created: job.created,
                deadline: job.deadline,
                last: None,
                prompt,
                processed: 0,
                cached: 0,
                _permit: job.permit,
            };
            texts.insert(id, text);
        }
        // Nobody has to listen.
        Err(error) => drop(job.events.try_send(Err(NoToken::Failed(error)))),
    }
}

/// Gives up texts that nobody waits for, or that have taken too long.
fn give_up(
    engine: &mut Engine,
    texts: &mut HashMap<RequestId, Text>,
    now: Instant,
) -> Result<(), GenerateError> {
    let is_over = |text: &Text| text.events.is_closed() || text.deadline <= now;
    for (id, text) in texts.extract_if(|_, text| is_over(text)) {
        let _ = text.events.try_send(Err(NoToken::Late));
        engine.abort(id)?;
    }
    Ok(())
}

/// Sends tokens to those who wait for them. Returns texts that are given up because nobody reads.
fn hand_out(
    outputs: Vec<Output>,
    texts: &mut HashMap<RequestId, Text>,
    metrics: &Metrics,
) -> Vec<RequestId> {
    let mut given_up = Vec::new();
    let now = Instant::now();
    let mut counts: HashMap<RequestId, u32> = HashMap::new();
    for output in &outputs {
        *counts.entry(output.request).or_default() += 1;
    }
    for (id, count) in counts {
        if let Some(text) = texts.get_mut(&id) {
            match text.last.replace(now) {
                None => metrics.first_token(now - text.created),
                Some(last) => metrics.tokens(now - last, count),
            }
        }
    }
    for output in outputs {
        let (id, finish) = (output.request, output.finish);
        let ended = output.token.is_err() || finish.is_some();
        let event = output.token.map(|id| Token {
            id,
            log_probs: output.log_probs,
            finish,
            cached: output.cached,
        });
        let event = event.map_err(NoToken::Failed);
        let Some(text) = texts.get(&id) else {
            continue;
        };
        // One place is for how it ends.
        let is_behind = text.events.capacity() <= usize::from(!ended);
        let event = if is_behind {
            Err(NoToken::Behind)
        } else {
            event
        };
        // Who does not listen any more is found before the next step.
        let _ = text.events.try_send(event);
        if is_behind && !ended {
            given_up.push(id);
        }
        if is_behind || ended {
            texts.remove(&id);
        }
    }
    given_up
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ds4_model::checkpoint::{Checkpoint, LoadOptions};
    use ds4_model::generate::EngineConfig;
    use ds4_model::model::Model;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::shared::shipped_checkpoint;

    fn ds4_tiny() -> Model {
        let checkpoint = Checkpoint::open(&shipped_checkpoint()).expect("an asset");
        let device = DeviceSpec::Flex.init().expect("it is always present");
        let model = checkpoint.load(&LoadOptions::default(), &device);
        model.expect("an asset")
    }

    /// A text of ten tokens, and what comes of it. There are so many places for events, and so
    /// long.
    fn job(
        places: usize,
        time: Duration,
        permits: &Arc<Semaphore>,
    ) -> (Job, async_mpsc::Receiver<Event>) {
        let (events, reader) = async_mpsc::channel(places);
        let created = Instant::now();
        let job = Job {
            request: Request {
                ignore_eos: true,
                ..Request::new(&[0, 7], 10)
            },
            events,
            created,
            deadline: created + time,
            permit: permits.clone().try_acquire_owned().expect("it is free"),
        };
        (job, reader)
    }

    #[test]
    fn texts_are_answered_while_the_server_warms_up() {
        let (jobs, receiver) = mpsc::channel();
        let startup = Arc::new(Startup::default());
        let told = startup.clone();
        let engine = std::thread::spawn(move || {
            let (model, config) = (ds4_tiny(), EngineConfig::default());
            let warming = Warming::new(&model, &config, told);
            let engine = Engine::new(&model, config).expect("valid options");
            serve(engine, &receiver, Some(warming), &Metrics::default())
        });
        let permits = Arc::new(Semaphore::new(1));
        let answered = || {
            let (job, mut reader) = job(20, Duration::from_secs(3600), &permits);
            jobs.send(job).expect("it runs");
            std::iter::from_fn(|| reader.blocking_recv())
                .filter(Result::is_ok)
                .count()
        };
        // Before the first round, between two, and in the midst of one.
        for over in 0..3 {
            let begun = Instant::now();
            while startup.progress().is_none_or(|(own, _)| own < over) {
                assert!(begun.elapsed() < Duration::from_secs(60), "it goes on");
                std::thread::yield_now();
            }
            assert_eq!(answered(), 10);
        }
        let (over, all) = startup.progress().expect("it warms up");
        assert!(2 <= over && over < all, "{over} of {all}");
        // Not after all rounds.
        drop(jobs);
        engine
            .join()
            .expect("it does not panic")
            .expect("a device that works");
        assert!(startup.progress().is_some());
    }

    /// What comes of a text of ten tokens for a reader who comes when all is over: tokens, and why
    /// there are no more. The engine has so many places for events, and so long.
    fn unread(places: usize, time: Duration, config: &EngineConfig) -> (usize, Option<NoToken>) {
        let model = ds4_tiny();
        let engine = Engine::new(&model, config.clone()).expect("valid options");
        let (jobs, receiver) = mpsc::channel();
        let permits = Arc::new(Semaphore::new(1));
        let (job, mut reader) = job(places, time, &permits);
        jobs.send(job).expect("the receiver is here");
        drop(jobs);
        serve(engine, &receiver, None, &Metrics::default()).expect("a device that works");
        assert_eq!(permits.available_permits(), 1, "the place is free again");
        let mut tokens = 0;
        while let Ok(event) = reader.try_recv() {
            match event {
                Ok(_) => tokens += 1,
                Err(reason) => return (tokens, Some(reason)),
            }
        }
        (tokens, None)
    }

    #[test]
    fn texts_that_nobody_reads_or_that_take_too_long_are_given_up_for_a_reason() {
        let long = Duration::from_secs(3600);
        // With drafts, one step has several tokens, the last of all among them.
        for drafts in [0, 1] {
            let config = EngineConfig {
                drafts,
                ..EngineConfig::default()
            };
            let unread = |places, time| unread(places, time, &config);
            for places in [10, 11] {
                assert!(matches!(unread(places, long), (10, None)));
            }
            for places in 1..10 {
                match unread(places, long) {
                    (tokens, Some(NoToken::Behind)) => assert_eq!(tokens, places - 1),
                    other => panic!("{places} places: {other:?}"),
                }
            }
            assert!(matches!(
                unread(11, Duration::ZERO),
                (0, Some(NoToken::Late))
            ));
        }
    }
}
