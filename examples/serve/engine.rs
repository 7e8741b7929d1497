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
    ChatEncoding, Engine, FinishReason, GenerateConfig, GenerateError, Output, Request, RequestId,
    TextTokenizer, TokenLogProbs,
};
use ds4_model::pipeline::Pipeline;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::grammar;
use crate::metrics::{Metrics, StepFigures};
use crate::options::Args;
use crate::shared::load_bar::LoadBar;
use crate::shared::load_options;
use crate::shared::place::Place;
use crate::startup::Startup;
use crate::warm_up::warm_up;

/// An error of the thread.
pub type Failure = Box<dyn Error + Send + Sync>;

/// A text to be continued.
#[derive(Debug)]
pub struct Job {
    /// What is asked of the engine.
    pub request: Request,
    /// Where the tokens go. The text is given up when nobody listens any more.
    pub events: UnboundedSender<Event>,
    /// When the request came.
    pub created: Instant,
    /// Its place among the texts that may run and wait.
    pub permit: OwnedSemaphorePermit,
}

/// The next token of a text, or why there is none.
pub type Event = Result<Token, GenerateError>;

/// A token of a text.
#[derive(Debug)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its log-probabilities, if they are wanted.
    pub log_probs: Option<TokenLogProbs>,
    /// Why it was the last one.
    pub finish: Option<FinishReason>,
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
    pub encoding: ChatEncoding,
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
    pub fn start(args: Args, metrics: Arc<Metrics>) -> Result<Self, Failure> {
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
    args: &Args,
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
    let known = Loaded {
        tokenizer: pipeline.tokenizer.clone(),
        config: pipeline.model.config().clone(),
        defaults: pipeline.defaults.clone(),
        place,
        drafts: config.drafts,
        encoding: args.encoding.map_or(pipeline.chat.encoding, Into::into),
        startup: startup.clone(),
    };
    let is_cold = !args.no_warm_up && known.place.device() != DeviceSpec::Flex;
    if !is_cold {
        startup.finish();
    }
    // From here on the server listens: texts that come meanwhile wait.
    loaded.send(known)?;
    if is_cold {
        let started = Instant::now();
        let most = pipeline.model.config().max_position_embeddings;
        let ctx = args.ctx.map_or(most, |ctx| most.min(ctx as usize));
        warm_up(&pipeline.model, &config, ctx, &startup)?;
        startup.finish();
        let seconds = started.elapsed().as_secs_f32();
        match startup.is_given_up() {
            true => tracing::info!(seconds, "not all kernels are compiled: the server stops"),
            false => tracing::info!(seconds, "ready, kernels are compiled"),
        }
    }
    Ok(serve(engine, jobs, metrics)?)
}

/// A text in the engine.
struct Text {
    events: UnboundedSender<Event>,
    created: Instant,
    /// When its last token came.
    last: Option<Instant>,
    /// Tokens of its prompt, and those of them that are processed.
    prompt: usize,
    processed: usize,
    _permit: OwnedSemaphorePermit,
}

/// Steps while there are texts, and waits for some otherwise.
fn serve(mut engine: Engine, jobs: &Receiver<Job>, metrics: &Metrics) -> Result<(), GenerateError> {
    let mut texts: HashMap<RequestId, Text> = HashMap::new();
    loop {
        if texts.is_empty() {
            metrics.load(&engine);
            match jobs.recv() {
                Ok(job) => add(job, &mut engine, &mut texts),
                Err(_) => return Ok(()),
            }
        }
        while let Ok(job) = jobs.try_recv() {
            add(job, &mut engine, &mut texts);
        }
        abort_abandoned(&mut engine, &mut texts)?;
        metrics.load(&engine);

        let started = Instant::now();
        let outputs = engine.step()?;
        // Who gets a token finds the figures of the step that made it.
        metrics.load(&engine);
        let mut figures = StepFigures {
            generated: outputs.iter().filter(|output| output.token.is_ok()).count(),
            ..StepFigures::default()
        };
        for (id, text) in &mut texts {
            // A text that has ended is not known any more; its prompt was processed.
            let processed = engine.progress(*id).map_or(text.prompt, |p| p.processed);
            figures.prompt += processed - text.processed;
            text.processed = processed;
        }
        hand_out(outputs, &mut texts, metrics);
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
                last: None,
                prompt,
                processed: 0,
                _permit: job.permit,
            };
            texts.insert(id, text);
        }
        // Nobody has to listen.
        Err(error) => drop(job.events.send(Err(error))),
    }
}

/// Gives up texts that nobody waits for.
fn abort_abandoned(
    engine: &mut Engine,
    texts: &mut HashMap<RequestId, Text>,
) -> Result<(), GenerateError> {
    for (id, _) in texts.extract_if(|_, text| text.events.is_closed()) {
        engine.abort(id)?;
    }
    Ok(())
}

/// Sends tokens to those who wait for them.
fn hand_out(outputs: Vec<Output>, texts: &mut HashMap<RequestId, Text>, metrics: &Metrics) {
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
        });
        if let Some(text) = texts.get(&id) {
            // Who does not listen any more is found before the next step.
            let _ = text.events.send(event);
        }
        if ended {
            texts.remove(&id);
        }
    }
}
