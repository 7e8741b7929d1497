//! The program as its users run it. One binary, so that one copy of it tests all commands.

mod cli;
mod cli_bench;
#[cfg(unix)]
mod cli_chat;
mod cli_damaged;
mod cli_flash_head;
mod cli_generate;
mod cli_serve;
mod golden;
mod inspected;
