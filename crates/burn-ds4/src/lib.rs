//! DeepSeek-V4 for people who install a program: `burn-ds4` serves, chats, continues texts,
//! inspects, converts, evaluates and times checkpoints.
//!
//! The library has what others mount or embed: [`serve::Server`], whose routes are an
//! [`axum::Router`], and the loop of a [`chat`]. The model itself is the crate [`ds4_model`].
//!
//! # Example
//!
//! A service of your own that has the routes of `burn-ds4 serve` below one of its paths:
//!
//! ```no_run
//! # #[cfg(feature = "protocols")]
//! # async fn example() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! use axum::Router;
//! use burn_ds4::serve::{Options, Server};
//!
//! let options = Options { model: "DeepSeek-V4-Flash".into(), ..Options::default() };
//! // Loading takes a while, in which others wait for this thread.
//! let server = tokio::task::spawn_blocking(move || Server::start(&options)).await??;
//! let router: Router = Router::new().nest_service("/model", server.router());
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
//! axum::serve(listener, router).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! Conversations take the feature `protocols`, which is on by default: DeepSeek's own crates, and
//! with them a C and a C++ compiler. Without it there are `generate`, `inspect`, `convert`, `eval`
//! and `bench`. `flex` (default), `wgpu`, `cuda` and `cpu` choose the devices.

mod bench;
#[cfg(feature = "protocols")]
pub mod chat;
#[cfg(feature = "protocols")]
pub mod conversation;
mod convert;
mod eval;
pub mod generate;
mod inspect;
#[cfg(feature = "protocols")]
pub mod serve;
mod shared;

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

/// Runs checkpoints of DeepSeek-V4.
#[derive(Debug, Parser)]
#[command(
    name = "burn-ds4",
    version,
    subcommand_required = true,
    arg_required_else_help = true
)]
struct Cli {
    /// Folder for compiled CUDA kernels, which the next start then need not compile, or `none`
    /// [default: burn-ds4 in the user's directory for caches].
    #[arg(long, global = true, value_name = "DIR")]
    kernel_cache: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

// One is parsed in a run.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Subcommand)]
enum Command {
    #[cfg(feature = "protocols")]
    Serve(serve::Options),
    /// Chats at the terminal.
    #[cfg(feature = "protocols")]
    Chat(generate::ModelOptions),
    Generate(generate::Options),
    Inspect(inspect::Options),
    Convert(convert::Options),
    Eval(eval::Options),
    Bench(bench::BenchOptions),
    /// Writes completions for a shell to standard output.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Writes a man page of the program, or of one of its commands, to standard output.
    Man {
        /// The command.
        command: Option<String>,
    },
}

/// The program `burn-ds4`, with the arguments of the process.
///
/// # Safety
///
/// The process has one thread: variables of its environment are set, which drivers read.
pub unsafe fn main() -> ExitCode {
    let cli = Cli::parse();
    // SAFETY: that of this function.
    unsafe { shared::kernels::keep(cli.kernel_cache.as_deref()) };
    #[cfg(feature = "protocols")]
    let logs = matches!(cli.command, Command::Serve(_));
    #[cfg(not(feature = "protocols"))]
    let logs = false;
    if !logs {
        shared::log::show();
    }
    shared::finish(cli.command.run())
}

impl Command {
    fn run(&self) -> Result<(), Box<dyn Error>> {
        match self {
            #[cfg(feature = "protocols")]
            Self::Serve(options) => serve::run(options),
            #[cfg(feature = "protocols")]
            Self::Chat(options) => generate::run_chat(options),
            Self::Generate(options) => generate::run(options),
            Self::Inspect(options) => inspect::run(options),
            Self::Convert(options) => convert::run(options),
            Self::Eval(options) => eval::run(options),
            Self::Bench(options) => bench::run(options),
            Self::Completions { shell } => {
                let mut text = Vec::new();
                let mut command = Cli::command();
                clap_complete::generate(*shell, &mut command, "burn-ds4", &mut text);
                Ok(io::stdout().write_all(&text)?)
            }
            Self::Man { command } => man(command.as_deref()),
        }
    }
}

fn man(name: Option<&str>) -> Result<(), Box<dyn Error>> {
    let mut command = Cli::command();
    command.build();
    let command = match name {
        None => command,
        Some(name) => {
            let found = command.find_subcommand(name).cloned();
            found.ok_or_else(|| format!("there is no command {name:?}"))?
        }
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(command).render(&mut text)?;
    Ok(io::stdout().write_all(&text)?)
}
