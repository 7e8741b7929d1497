//! The programs as their users meet them. One binary, so that one copy of it tests all of them.

mod cli;
#[cfg(unix)]
mod cli_chat;
mod cli_damaged;
mod cli_flash_head;
mod cli_generate;
mod cli_serve;
mod golden;
mod inspected;
