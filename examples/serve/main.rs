//! Serves a DeepSeek-V4 checkpoint over HTTP, with the interface of OpenAI's API.
//!
//! Without arguments it serves the small trained checkpoint that comes with the repository, on the
//! best device that is compiled in and present. `docs/serving.md` describes endpoints and options.
//!
//! One thread owns the model and decodes the texts of all requests together (`engine`). Requests
//! are read and checked (`request`, `chat`, `completions`), submitted (`app`), and their tokens
//! become text (`text`), which is collected (`answer`) and written (`reply`).

mod answer;
mod app;
mod chat;
mod completions;
mod engine;
mod error;
mod grammar;
mod log_probs;
mod metrics;
mod options;
mod reply;
mod request;
mod response_format;
mod routes;
#[path = "../shared/mod.rs"]
mod shared;
mod startup;
mod text;
mod tracker;
mod warm_up;

use std::error::Error;
use std::io::{self, Write};
use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use tokio::sync::oneshot;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::app::App;
use crate::engine::{EngineThread, join};
use crate::metrics::Metrics;
use crate::options::Args;
use crate::shared::finish;

/// How long connections may take to end after the last answer.
const LAST_BYTES: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    log_to_stderr();
    // What is wrong with the arguments is told before anything is loaded.
    args.engine(0).validate()?;
    args.drafts.check()?;
    args.key()?;
    let address = (args.host, args.port);
    let listener = TcpListener::bind(address)
        .map_err(|error| format!("{}:{}: {error}", args.host, args.port))?;
    listener.set_nonblocking(true)?;

    let metrics = Arc::new(Metrics::default());
    let engine = EngineThread::start(args.clone(), metrics.clone());
    let engine = engine.map_err(|error| -> Box<dyn Error> { error })?;
    // It lives as long as the program: answers refer to its tokenizer.
    let app: &'static App = Box::leak(Box::new(App::new(
        args,
        engine.loaded,
        engine.jobs,
        metrics,
    )?));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let ended = runtime.block_on(serve(app, listener, engine.ended))?;
    runtime.shutdown_background();
    match ended {
        true => join(engine.thread).map_err(|error| -> Box<dyn Error> { error }),
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
