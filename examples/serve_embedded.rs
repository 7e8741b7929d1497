//! A web service of your own that answers for a model, too: the routes of `burn-ds4 serve` below
//! one of yours.
//!
//!     cargo run --release -p burn-ds4 --example serve_embedded
//!     curl http://127.0.0.1:8081/
//!     curl http://127.0.0.1:8081/model/v1/models

use std::error::Error;

use axum::Router;
use axum::routing::get;
use burn_ds4::serve::{Options, Server};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let options = Options {
        name: Some("tiny".into()),
        ..Options::default()
    };
    // Loading takes a while, in which others wait for this thread.
    let server = tokio::task::spawn_blocking(move || Server::start(&options)).await??;
    let router = Router::new()
        .route("/", get(|| async { "The model is at /model.\n" }))
        .nest_service("/model", server.router());

    let listener = tokio::net::TcpListener::bind("127.0.0.1:8081").await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, router)
        .with_graceful_shutdown(async {
            // Without signals, only the end of the process stops it.
            let _ = tokio::signal::ctrl_c().await;
        })
        .await?;
    server.close();
    server.join()
}
