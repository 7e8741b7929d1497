//! A server of a DeepSeek-V4 checkpoint, with the interfaces of OpenAI's and of Anthropic's API.
//!
//! [`Server`] loads a checkpoint and has an [`axum::Router`], which other routers can mount.
//! `docs/serving.md` describes endpoints and options.
//!
//! One thread owns the model and decodes the texts of all requests together (`engine`). Requests
//! are read and checked (`request`, `chat`, `convert`, `completions`), submitted (`app`), and their
//! tokens become text (`text`), which is collected (`answer`) and written (`reply`).

mod answer;
mod app;
mod call_grammar;
mod call_schema;
mod chat;
mod completions;
mod convert;
mod engine;
mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod grammar;
mod log_probs;
mod metrics;
mod options;
mod reply;
mod request;
mod response_format;
mod routes;
mod schema;
mod startup;
mod text;
mod tracker;
mod warming;

use std::error::Error;
use std::io::{self, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use tokio::sync::oneshot;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use app::App;
use engine::{EngineThread, Failure, join};
use metrics::Metrics;
pub use options::Options;

/// How long connections may take to end after the last answer.
const LAST_BYTES: Duration = Duration::from_secs(5);

/// A checkpoint that is loaded, and what answers requests for it.
///
/// # Example
///
/// ```no_run
/// use burn_ds4::serve::{Options, Server};
///
/// let server = Server::start(&Options::default())?;
/// let router: axum::Router = axum::Router::new().nest_service("/model", server.router());
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
#[derive(Debug)]
pub struct Server {
    app: &'static App,
    ended: oneshot::Receiver<()>,
    thread: JoinHandle<Result<(), Failure>>,
}

impl Server {
    /// Loads a checkpoint, and starts the thread that decodes texts.
    ///
    /// # Errors
    ///
    /// If an option does not suit the model, the checkpoint cannot be loaded, or the device is not
    /// there. What is wrong with the options is told before anything is loaded.
    pub fn start(options: &Options) -> Result<Self, Failure> {
        check(options).map_err(|error| error.to_string())?;
        let metrics = Arc::new(Metrics::default());
        let engine = EngineThread::start(options.clone(), metrics.clone())?;
        let app = App::new(options, engine.loaded, engine.jobs, metrics);
        Ok(Self {
            // It lives as long as the program: answers refer to its tokenizer.
            app: Box::leak(Box::new(app.map_err(|error| error.to_string())?)),
            ended: engine.ended,
            thread: engine.thread,
        })
    }

    /// All routes: the page at `/`, those of the APIs below `/v1`, `/health` and `/metrics`. Below
    /// a path of another router, mounted by [`Router::nest_service`], the page is there with and
    /// without a slash at its end.
    pub fn router(&self) -> Router {
        routes::router(self.app)
    }

    /// Takes no further requests. Those that run are answered.
    pub fn close(&self) {
        self.app.close();
    }

    /// Waits until the requests that ran when the server [was closed](Self::close) are answered.
    ///
    /// # Errors
    ///
    /// What the engine has failed with.
    pub fn join(self) -> Result<(), Failure> {
        join(self.thread)
    }
}

fn check(options: &Options) -> Result<(), Box<dyn Error>> {
    options.engine(0).validate()?;
    options.drafts.check()?;
    options.key()?;
    Ok(())
}

/// Serves at an address, until a signal comes.
///
/// # Errors
///
/// As [`Server::start`], if the address cannot be listened at, or the device fails.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    log_to_stderr();
    check(options)?;
    let address = (options.host, options.port);
    let listener = TcpListener::bind(address)
        .map_err(|error| format!("{}:{}: {error}", options.host, options.port))?;
    listener.set_nonblocking(true)?;
    let server = Server::start(options).map_err(|error| -> Box<dyn Error> { error })?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let ended = runtime.block_on(serve(server.app, listener, server.ended))?;
    runtime.shutdown_background();
    match ended {
        true => join(server.thread).map_err(|error| -> Box<dyn Error> { error }),
        false => Err("stopped by a second signal".into()),
    }
}

/// Logs what the server and the library have to say; what graphics drivers complain about helps
/// nobody here.
fn log_to_stderr() {
    let own = [env!("CARGO_CRATE_NAME"), "ds4_model", "burn_ds4_ops"];
    let own = own.map(|target| (target, LevelFilter::INFO));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_target(false);
    tracing_subscriber::registry()
        .with(lines)
        .with(Targets::from_iter(own))
        .init();
}

/// Serves until a signal comes, or the engine fails. Then running answers end, and new requests are
/// refused. Whether the engine has ended, and not a second signal come before.
async fn serve(
    app: &'static App,
    listener: TcpListener,
    mut engine_ended: oneshot::Receiver<()>,
) -> io::Result<bool> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let mut signals = Signals::new()?;
    let (stop, is_stopped) = oneshot::channel::<()>();
    let connections = routes::connections(listener, app.time_limit);
    let server = axum::serve(connections, routes::router(app));
    let server = server.with_graceful_shutdown(async {
        let _ = is_stopped.await;
    });
    let server = tokio::spawn(server.into_future());
    writeln!(io::stdout(), "listening on http://{address}")?;
    let (place, deterministic) = (&app.loaded.place, app.deterministic);
    tracing::info!(%address, model = app.model, %place, deterministic, "serving");

    tokio::select! {
        () = signals.next() => {
            tracing::info!("stopping, a second signal ends running answers");
            app.close();
            tokio::select! {
                () = signals.next() => return Ok(false),
                _ = &mut engine_ended => (),
            }
        }
        _ = &mut engine_ended => app.close(),
    }
    drop(stop);
    match tokio::time::timeout(LAST_BYTES, server).await {
        Ok(Ok(served)) => served?,
        Ok(Err(panicked)) => return Err(io::Error::other(panicked)),
        Err(_) => tracing::warn!("connections are still open"),
    }
    Ok(true)
}

/// Signals to stop.
struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    #[cfg(unix)]
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    #[cfg(unix)]
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => (),
            _ = self.interrupt.recv() => (),
        }
    }

    #[cfg(not(unix))]
    fn new() -> io::Result<Self> {
        Ok(Self {})
    }

    #[cfg(not(unix))]
    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            // Without signals, only the end of the process stops the server.
            std::future::pending::<()>().await;
        }
    }
}
