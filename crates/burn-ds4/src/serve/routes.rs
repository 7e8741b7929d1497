//! Which path and method leads where, and what is done for all of them.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD,
    AUTHORIZATION, CONTENT_SECURITY_POLICY, CONTENT_TYPE, VARY,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::Listener;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

use crate::serve::app::App;
use crate::serve::error::{ApiError, json_response};
use crate::serve::reply::reply;
use crate::serve::request::Prepared;
use crate::serve::tracker::Tracker;
use crate::serve::{chat, completions};

/// What the page may do: its own script and style, and requests to this server.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                      connect-src 'self'";

/// All routes.
pub fn router(app: &'static App) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/responses", post(responses))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .layer(from_fn_with_state(app, around))
        .with_state(app)
}

/// The connections of a listener, which send what they have at once, and end where a client reads
/// nothing for so long. A token of a stream is a small packet, which would otherwise wait until the
/// last one is acknowledged.
pub fn connections(
    listener: TcpListener,
    limit: Duration,
) -> impl Listener<Io = Connection, Addr = SocketAddr> {
    Connections { listener, limit }
}

type Connection = Pin<Box<TimeoutStream<TcpStream>>>;

struct Connections {
    listener: TcpListener,
    limit: Duration,
}

impl Listener for Connections {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (stream, address) = Listener::accept(&mut self.listener).await;
        // A connection that is gone already is found when it is read.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.limit));
        (Box::pin(stream), address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// Key, CORS and log of every request.
async fn around(State(app): State<&'static App>, mut request: Request, next: Next) -> Response {
    let tracker = Arc::new(Tracker::new(&request, app.metrics.clone()));
    request.extensions_mut().insert(tracker.clone());
    let path = request.uri().path().to_owned();
    let headers = request.headers();
    let asks = headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let asked = headers.get(ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = if app.cors.is_some() && request.method() == Method::OPTIONS && asks {
        StatusCode::NO_CONTENT.into_response()
    } else if needs_key(&path) && !app.admits(key(request.headers())) {
        let code = Some("invalid_api_key");
        let message = "the API key is missing or wrong";
        ApiError::new(StatusCode::UNAUTHORIZED, code, message).into_response()
    } else {
        next.run(request).await
    };
    if let Some(error) = response.extensions().get::<ApiError>() {
        response = error.response(&path);
    }
    if let Some(origin) = &app.cors {
        allow(response.headers_mut(), origin, asked);
    }
    tracker.responded(response.status());
    response
}

/// The page and the state of health are for everybody.
fn needs_key(path: &str) -> bool {
    !["/", "/health"].contains(&path)
}

fn key(headers: &HeaderMap) -> Option<&str> {
    if let Some(key) = headers.get("x-api-key") {
        return key.to_str().ok();
    }
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// Lets pages of the origin use the server, with whatever headers they ask for: clients add some of
/// their own, and none means anything else here.
fn allow(headers: &mut HeaderMap, origin: &HeaderValue, asked: Option<HeaderValue>) {
    let fixed = [
        (ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, OPTIONS"),
        (
            ACCESS_CONTROL_EXPOSE_HEADERS,
            "x-ds4-seed, x-ds4-deterministic",
        ),
        (VARY, "origin, access-control-request-headers"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let usual = HeaderValue::from_static("authorization, content-type");
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.unwrap_or(usual));
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
}

async fn page() -> impl IntoResponse {
    let policy = [(CONTENT_SECURITY_POLICY, POLICY)];
    (policy, Html(include_str!("page.html")))
}

async fn health(State(app): State<&'static App>) -> Result<Response, ApiError> {
    if !app.is_open() {
        return Err(ApiError::stopping());
    }
    let Some((over, all)) = app.loaded.startup.progress() else {
        return Ok(json_response(&json!({"status": "ok"})));
    };
    // The first round has what every request needs.
    let status = if over > 0 { "ok" } else { "warming up" };
    let warm_up = json!({"over": over, "rounds": all});
    let mut response = json_response(&json!({"status": status, "warm_up": warm_up}));
    if over == 0 {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    Ok(response)
}

async fn metrics(State(app): State<&'static App>) -> impl IntoResponse {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(CONTENT_TYPE, kind)], app.metrics.text())
}

async fn models(State(app): State<&'static App>) -> Response {
    json_response(&json!({"object": "list", "data": [describe(app)]}))
}

async fn model(
    State(app): State<&'static App>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    // A name that is not text is not that of a model.
    let name = name.map_or_else(|_| String::new(), |Path(name)| name);
    app.check_model(Some(&name))?;
    Ok(json_response(&describe(app)))
}

fn describe(app: &App) -> Value {
    json!({
        "id": app.model,
        "object": "model",
        "created": app.created,
        "owned_by": "ds4",
        "max_model_len": app.context,
        "lanes": app.lanes,
        "drafts": app.drafts,
        "deterministic": app.deterministic,
        "system_fingerprint": app.fingerprint,
    })
}

async fn chat(State(app): State<&'static App>, request: Request) -> Result<Response, ApiError> {
    generate(app, request, chat::prepare).await
}

async fn completions(
    State(app): State<&'static App>,
    request: Request,
) -> Result<Response, ApiError> {
    generate(app, request, completions::prepare).await
}

async fn responses(
    State(app): State<&'static App>,
    request: Request,
) -> Result<Response, ApiError> {
    generate(app, request, chat::prepare_response).await
}

async fn messages(State(app): State<&'static App>, request: Request) -> Result<Response, ApiError> {
    generate(app, request, chat::prepare_message).await
}

/// What a message would have to read.
async fn count_tokens(
    State(app): State<&'static App>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = read(app, request.into_body()).await?;
    let _place = app.place()?;
    let tokens = apart(&app.reading, move || chat::count_message(app, &body));
    let tokens = in_time(app, tokens).await?;
    Ok(json_response(&json!({"input_tokens": tokens})))
}

async fn generate(
    app: &'static App,
    request: Request,
    prepare: fn(&App, &[u8]) -> Result<Prepared, ApiError>,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let tracker = parts.extensions.get::<Arc<Tracker>>().cloned();
    let tracker = tracker.ok_or_else(|| ApiError::failed("the request is not followed"))?;
    drop(parts);
    let body = read(app, body).await?;
    if !app.is_open() {
        return Err(ApiError::stopping());
    }
    let place = app.place()?;
    let prepared = async {
        // A long prompt takes a while to encode, and a schema to read: others do not wait for that.
        let prepared = apart(&app.reading, move || prepare(app, &body)).await?;
        match prepared.wanted {
            None => Ok(prepared),
            Some(_) => apart(&app.reading_schemas, move || prepared.constrain(app)).await,
        }
    };
    reply(app, in_time(app, prepared).await?, place, tracker).await
}

/// Gives up what nobody would wait for any more.
async fn in_time<T>(
    app: &App,
    work: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let done = tokio::time::timeout(app.time_limit, work).await;
    done.unwrap_or_else(|_| {
        let (status, code) = (StatusCode::GATEWAY_TIMEOUT, Some("timeout"));
        Err(ApiError::new(
            status,
            code,
            "the request has waited too long",
        ))
    })
}

/// Does some work on a thread that may take a while, once one of so many is free.
async fn apart<T: Send + 'static>(
    threads: &Arc<Semaphore>,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let failed = || ApiError::failed("the request cannot be read");
    let thread = threads.clone().acquire_owned().await;
    let thread = thread.map_err(|_| failed())?;
    let done = tokio::task::spawn_blocking(move || {
        // Held until the work ends, whether or not anybody waits for it.
        let _thread = thread;
        work()
    });
    done.await.unwrap_or_else(|_| Err(failed()))
}

async fn read(app: &App, body: Body) -> Result<Bytes, ApiError> {
    let body = tokio::time::timeout(app.time_limit, to_bytes(body, app.max_body)).await;
    let body = body.map_err(|_| {
        let (status, code) = (StatusCode::REQUEST_TIMEOUT, Some("timeout"));
        ApiError::new(status, code, "the request has taken too long")
    })?;
    body.map_err(|_| {
        let most = app.max_body;
        let message = format!("the request cannot be read, or has more than {most} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, None, message)
    })
}

async fn not_found(request: Request) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("there is no {method} {path}");
    ApiError::new(StatusCode::NOT_FOUND, Some("unknown_url"), message)
}

async fn method_not_allowed(request: Request) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("{path} does not take {method}");
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        Some("method_not_allowed"),
        message,
    )
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::{Read, Write};

    use tokio::io::AsyncWrite;

    use super::*;

    #[tokio::test]
    async fn the_state_of_health_tells_a_server_that_warms_up_from_one_that_stops() {
        let app: &'static App = Box::leak(Box::new(crate::serve::fuzz::new_app()));
        let state = || async move {
            let response = health(State(app)).await;
            let response = response.unwrap_or_else(|error| error.response("/health"));
            let status = response.status().as_u16();
            let body = to_bytes(response.into_body(), 1 << 10).await.unwrap();
            (status, serde_json::from_slice::<Value>(&body).unwrap())
        };
        let warm_up = json!({"over": 0, "rounds": 7});
        app.loaded.startup.tell((0, 7));
        let expected = json!({"status": "warming up", "warm_up": warm_up});
        assert_eq!(state().await, (503, expected));
        app.loaded.startup.tell((1, 7));
        let (status, body) = state().await;
        assert_eq!((status, &body["status"]), (200, &json!("ok")));
        assert_eq!(body["warm_up"]["over"], json!(1));
        app.loaded.startup.tell((7, 7));
        assert_eq!(state().await, (200, json!({"status": "ok"})));
        app.close();
        let (status, body) = state().await;
        assert_eq!((status, &body["error"]["code"]), (503, &json!("stopping")));
    }

    #[tokio::test]
    async fn a_count_of_tokens_takes_a_place_and_has_its_time() {
        let mut app = crate::serve::fuzz::new_app();
        app.time_limit = Duration::from_millis(20);
        let app: &'static App = Box::leak(Box::new(app));
        let count = || {
            let body = r#"{"messages": [{"role": "user", "content": "Hi"}]}"#;
            count_tokens(State(app), Request::new(Body::from(body)))
        };
        let status = |counted: Result<Response, ApiError>| match counted {
            Ok(response) => response.status(),
            Err(error) => error.status,
        };
        let threads = app.reading.available_permits() as u32;
        let busy = app.reading.clone().acquire_many_owned(threads).await;
        assert_eq!(status(count().await), StatusCode::GATEWAY_TIMEOUT);
        drop(busy);
        let mut places = Vec::new();
        while let Ok(place) = app.place() {
            places.push(place);
        }
        assert_eq!(status(count().await), StatusCode::TOO_MANY_REQUESTS);
    }

    #[tokio::test]
    async fn the_page_is_at_the_path_that_the_router_is_mounted_at() {
        let app: &'static App = Box::leak(Box::new(crate::serve::fuzz::new_app()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mounted = Router::new().nest_service("/model", router(app));
        tokio::spawn(axum::serve(listener, mounted).into_future());
        for (path, status, text) in [
            ("/model", 200, "<!doctype html>"),
            ("/model/", 200, "<!doctype html>"),
            ("/model/v1/models", 200, "max_model_len"),
            ("/model/v1/none", 404, "there is no GET /v1/none"),
        ] {
            let response = tokio::task::spawn_blocking(move || {
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
                stream.write_all(head.as_bytes()).unwrap();
                let mut response = String::new();
                stream.read_to_string(&mut response).unwrap();
                response
            });
            let response = response.await.unwrap();
            assert!(
                response.starts_with(&format!("HTTP/1.1 {status}")),
                "{path}: {response}"
            );
            assert!(response.contains(text), "{path}: {response}");
        }
    }

    #[tokio::test]
    async fn connections_send_what_they_have_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let mut connections = connections(listener, Duration::from_secs(600));
        let (client, (connection, _)) = tokio::join!(client, connections.accept());
        assert!(connection.get_ref().nodelay().unwrap());
        drop(client);
    }

    #[tokio::test]
    async fn a_connection_ends_whose_client_does_not_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let mut connections = connections(listener, Duration::from_millis(20));
        let (client, (mut connection, _)) = tokio::join!(client, connections.accept());
        let error = loop {
            let zeros = [0; 1 << 16];
            let written = poll_fn(|context| connection.as_mut().poll_write(context, &zeros));
            if let Err(error) = written.await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(client);
    }
}
