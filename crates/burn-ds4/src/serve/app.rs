//! What all requests share.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderValue, StatusCode};
use deepseek_recipe_core::special_tokens::SpecialToken;
use ds4_model::generate::{Constraint, GenerateError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::serve::answer::{Answer, Choice};
use crate::serve::engine::{Job, Loaded, events};
use crate::serve::error::ApiError;
use crate::serve::grammar::{Grammars, Unfit, Wanted};
use crate::serve::metrics::Metrics;
use crate::serve::options::Options;
use crate::serve::reply::Format;
use crate::serve::request::Prepared;
use crate::serve::text::ChoiceText;
use crate::serve::tracker::Tracker;

/// The server, as its requests see it.
#[derive(Debug)]
pub struct App {
    /// What is known of the model.
    pub loaded: Loaded,
    /// The model's name.
    pub model: String,
    /// Tells configurations apart that may answer differently.
    pub fingerprint: String,
    /// When the model was loaded.
    pub created: u64,
    /// Whether an answer depends on nothing but its request.
    pub deterministic: bool,
    /// Most tokens of prompt and answer together.
    pub context: usize,
    /// Most texts at a time.
    pub lanes: usize,
    /// Tokens drafted per step.
    pub drafts: usize,
    /// Most bytes of a request.
    pub max_body: usize,
    /// The time that a request may take.
    pub time_limit: Duration,
    /// Origin whose pages may use the server.
    pub cors: Option<HeaderValue>,
    /// What the server counts.
    pub metrics: Arc<Metrics>,
    /// Made when the first request needs them.
    grammars: OnceLock<Grammars>,
    key: Option<String>,
    /// Places of texts that run and wait, and of requests that are read.
    places: Arc<Semaphore>,
    most_texts: usize,
    /// Requests that are read at a time, and schemas, which may take long.
    pub reading: Arc<Semaphore>,
    pub reading_schemas: Arc<Semaphore>,
    /// `None` once the server stops.
    jobs: Mutex<Option<Sender<Job>>>,
}

impl App {
    /// The server for a model that is loaded.
    ///
    /// # Errors
    ///
    /// If an option does not suit the model, or the key cannot be used.
    pub fn new(
        args: &Options,
        loaded: Loaded,
        jobs: Sender<Job>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let longest = loaded.config.max_position_embeddings;
        let context = args.ctx.map_or(longest, |ctx| ctx as usize);
        if context > longest {
            return Err(format!("--ctx is {context}, the model's context {longest}").into());
        }
        let engine = args.engine(loaded.drafts);
        let places = engine.lanes + usize::from(args.queue);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            model: args.model_name(),
            fingerprint: fingerprint(args, &loaded),
            created: unix_time(),
            deterministic: engine.is_deterministic(),
            context,
            lanes: engine.lanes,
            drafts: engine.drafts,
            max_body: args.max_body,
            time_limit: args.time_limit(),
            cors: args.cors.clone(),
            metrics,
            grammars: OnceLock::new(),
            key: args.key()?,
            places: Arc::new(Semaphore::new(places)),
            // The other half is for others.
            most_texts: places.div_ceil(2).max(engine.lanes),
            reading: Arc::new(Semaphore::new(threads)),
            reading_schemas: Arc::new(Semaphore::new(1)),
            jobs: Mutex::new(Some(jobs)),
            loaded,
        })
    }

    /// Texts that a request may ask for.
    pub fn most_texts(&self) -> usize {
        self.most_texts
    }

    /// Refuses another model than the one that is served.
    pub fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            Some(name) if name != self.model => {
                let message = format!("there is no model {name:?}, only {:?}", self.model);
                let status = StatusCode::NOT_FOUND;
                Err(ApiError::new(status, Some("model_not_found"), message))
            }
            _ => Ok(()),
        }
    }

    /// The ids of a text to continue.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        let mut ids = vec![self.loaded.config.bos_token_id];
        ids.extend(self.loaded.tokenizer.encode(text)?);
        Ok(ids)
    }

    /// Lets a choice be what is wanted, after its reasoning if it has some.
    pub fn constraint(
        &self,
        wanted: Wanted,
        format: Format,
        reasons: bool,
    ) -> Result<Box<dyn Constraint>, ApiError> {
        let invalid = |unfit| {
            let (field, error) = match unfit {
                Unfit::Tools(error) => ("tools", error),
                Unfit::Format(error) => (format.schema(), error),
            };
            ApiError::invalid(field, format!("`{field}`: {error}"))
        };
        let grammars = self.grammars.get_or_init(|| Grammars::new(&self.loaded));
        let constraint = grammars.constraint(wanted).map_err(invalid)?;
        if !reasons {
            return Ok(constraint);
        }
        let token = SpecialToken::ThinkingEnd.default_str();
        let end = self.loaded.tokenizer.token_id(token);
        let missing = || invalid(Unfit::Format(format!("the tokenizer has no {token}")));
        Ok(grammars.after_reasoning(constraint, end.ok_or_else(missing)?))
    }

    /// Whether requests need no key, or this one is right.
    pub fn admits(&self, key: Option<&str>) -> bool {
        match (&self.key, key) {
            (None, _) => true,
            (Some(expected), Some(key)) => is_equal(expected.as_bytes(), key.as_bytes()),
            (Some(_), None) => false,
        }
    }

    /// A place of a text, before anything is done for it.
    pub fn place(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let place = self.places.clone().try_acquire_owned();
        place.map_err(|_| {
            let message = "too many texts are waiting, try again later";
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message)
        })
    }

    /// Hands the texts of a request to the engine. The first of them has a place.
    pub fn submit(
        &'static self,
        prepared: Prepared,
        first: OwnedSemaphorePermit,
        tracker: Arc<Tracker>,
    ) -> Result<Answer, ApiError> {
        let jobs = self.jobs().clone().ok_or_else(ApiError::stopping)?;
        let count = prepared.requests.len();
        let more = (1..count).map(|_| self.place());
        let places = std::iter::once(Ok(first)).chain(more);
        let places: Vec<_> = places.collect::<Result<_, _>>()?;
        tracker.prompt(prepared.prompts.iter().sum());
        let mut choices = Vec::with_capacity(count);
        let created = Instant::now();
        let deadline = created + self.time_limit;
        for (request, permit) in prepared.requests.into_iter().zip(places) {
            let options = prepared.conversation.as_ref();
            let text = ChoiceText::new(
                &self.loaded.tokenizer,
                options.map(|own| own.parsing_options.clone()),
                prepared.one_call,
                &prepared.stops,
            );
            let text = text.map_err(|error| ApiError::of_request(&error, "stop"))?;
            let (events, receiver) = events();
            let job = Job {
                request,
                events,
                created,
                deadline,
                permit,
            };
            let sent = jobs.send(job);
            sent.map_err(|_| ApiError::failed("the engine has ended"))?;
            choices.push(Choice {
                text,
                events: Some(receiver),
            });
        }
        Ok(Answer {
            format: prepared.format,
            conversation: prepared.conversation,
            choices,
            prompts: prepared.prompts,
            deadline: deadline.into(),
            fingerprint: &self.fingerprint,
            tracker,
        })
    }

    /// Whether requests are taken.
    pub fn is_open(&self) -> bool {
        self.jobs().is_some()
    }

    /// Takes no further requests. The engine ends when those that it has are answered.
    pub fn close(&self) {
        *self.jobs() = None;
    }

    fn jobs(&self) -> MutexGuard<'_, Option<Sender<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    time.map_or(0, |time| time.as_secs())
}

fn fingerprint(args: &Options, loaded: &Loaded) -> String {
    let mut hasher = DefaultHasher::new();
    let (engine, place) = (args.engine(loaded.drafts), &loaded.place);
    let build = (env!("CARGO_PKG_VERSION"), args.rounding);
    format!("{engine:?} {place:?} {build:?}").hash(&mut hasher);
    format!("{:?}", loaded.config).hash(&mut hasher);
    format!("fp_{:016x}", hasher.finish())
}

/// Compares in a time that depends on the lengths alone.
fn is_equal(expected: &[u8], given: &[u8]) -> bool {
    let differences = expected.iter().zip(given).map(|(a, b)| a ^ b);
    let differ = differences.fold(0, |all, bits| all | bits);
    std::hint::black_box(differ) == 0 && expected.len() == given.len()
}
