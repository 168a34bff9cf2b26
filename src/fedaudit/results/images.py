"""What was found of images, volumes and signals: of one victim, of one run, and of an attack's runs together."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from fedaudit.results.record import Interval, Record, optional

Look = Literal["pixel", "pattern", "embedding"]  # how pictures are compared


class RegisteredResult(Record):
    """Scores of a reconstruction after the move that brings it nearest.

    That is a shift (up to a quarter of the side) and a flip; or quarter turns, a flip and another contrast and
    brightness, which may be negative: then every error is relative to what an even image of the colours has.
    """

    psnr: float = Field(
        description="dB where the moved reconstruction covers the victim; what an even image would gain is taken off"
    )
    ssim: float | None = Field(description="on the same part; null: signals")
    correlation: float | None = optional("of signals, on the same part")
    flipped: bool = Field(description="mirrored from left to right, before the shift")
    down: int = Field(description="pixels that the reconstruction is shifted down; negative: up")
    right: int = Field(description="pixels that it is shifted to the right, of signals points in time; negative: left")
    deep: int = Field(default=0, description="of volumes, slices that it is shifted further; negative: back")
    turns: int = Field(default=0, description="quarter turns to the left, after a flip")
    contrast: float = Field(default=1.0, description="factor of all values; below 0: the reconstruction is a negative")
    rank: int | None = Field(
        description="as the image's, with every candidate after its own best move; null where none helps"
    )
    psnr_nearest_other: float | None = Field(description="as the image's, alike; null where no move helps")
    as_far_by_luck: float | None = optional("as the image's; null: evaluated before that was")
    psnr_mean_image: float = Field(description="baseline: the mean image of the candidates after its own best move")


class NamedResult(Record):
    """Whom or what a reconstruction names, a shifted or pale one, too: the rank of the true one; 1 = named."""

    of: Literal["image", "person"] = Field(description="of the class; persons by pictures of which none was attacked")
    candidates: int = Field(description="images or persons, among which one is named")
    chance_level: float = Field(description="probability that it is named by luck; 1: its label alone names it")
    pixel: int = Field(description="rank by the squared error of pixels")
    pattern: int = Field(description="by correlation, each channel's mean taken off, a pixel's shift allowed")
    embedding: int | None = Field(
        description="by a network that pictures taught of which none was attacked; null: none"
    )

    def among(self, look: Look, candidates: int) -> float | None:
        """Return the probability that the true one is named among so many: itself and others, drawn of all that are.

        None where there are fewer, or that look wasn't taken.
        """
        rank = getattr(self, look)
        if rank is None or candidates > self.candidates:
            return None
        others = candidates - 1
        return math.comb(self.candidates - rank, others) / math.comb(self.candidates - 1, others)


class ImageResult(Record):
    """One victim image, volume or signal against its reconstruction. Paths are relative to the folder of results.json.

    Signals are measured in units of each channel's range over the candidates.
    """

    true_image: str = Field(description="PNG of the victim")
    reconstruction: str = Field(description="PNG of what the attack recovered")
    true_label: int | None = Field(description="the victim's class; null where examples have none")
    label: int | None = Field(description="label that the attack used for this image")
    mse: float = Field(description="mean squared error on [0, 1] pixels")
    psnr: float = Field(description="dB on [0, 1] pixels, capped at 100")
    ssim: float | None = Field(description="structural similarity, 1 for a perfect copy; null: signals")
    correlation: float | None = optional("of signals (Pearson), each channel's mean taken off, 1 for a perfect copy")
    mse_normalised: float | None = optional("mean squared error on pixels as the model sees them: (x - mean) / std")
    psnr_normalised: float | None = optional(
        "dB, -10 log10 of mse_normalised: the peak is taken for 1, so it may be negative"
    )
    lpips: float | None = optional("null where the weights could not be had: see lpips_missing")
    victim: str = Field(default="", description="equal for equal victims, in whatever round or update they are")
    rank: int = Field(
        description="how many candidates are at least as near to the reconstruction (MSE); 1 = identified"
    )
    rank_pattern: int | None = optional(
        "the same by the correlation of what is left when each channel's mean is taken off: without colour, brightness "
        "and contrast"
    )
    candidates: int = Field(description="size of the candidate set that rank refers to")
    different_candidates: int | None = optional("of them, how many differ from each other")
    chance_level: float | None = optional("probability that naming candidates of its class at random identifies it")
    psnr_nearest_other: float | None = optional(
        "of the reconstruction to the nearest other candidate, in dB; null: there is none"
    )
    as_far_by_luck: float | None = optional(
        "share of the candidates that are, with their own nearest one, as far ahead of any further one as this is with "
        "its victim; null: evaluated before that was"
    )
    alike_candidates: int | None = optional(
        "of how many pictures the candidates' groups are, where they come in groups that are much alike, as several of "
        "a person are; 1: in none; null: evaluated before that was"
    )
    distractor_margin_db: float = Field(
        default=0.0,
        description="by how many dB it is nearer to one candidate that is no victim than to any further one",
    )
    named: NamedResult | None = optional("whom or what it names; null: evaluated before that was, or no picture")
    uses: int = Field(default=1, description="how often the update used this example (local epochs)")
    rounds: list[int] = Field(default=[], description="the rounds that it was recovered from, where there are several")
    certified: bool | None = optional(
        "whether the attack vouched for it without the truth, as the client's own up to half a grey level; "
        "null: it vouches for none"
    )
    psnr_mean_image: float = Field(description="baseline: the mean image of the candidates, as if it were the recovery")
    psnr_same_class: float | None = Field(description="baseline: a random other image of the same class")
    registered: RegisteredResult | None = optional("after the best shift and flip; null: evaluated before that was")
    tone_aligned: RegisteredResult | None = optional(
        "after the best quarter turns, flip, contrast and brightness, a negative included; null: evaluated before that"
    )

    def score(self, name: str) -> float | None:
        """Return the score of that name; ``psnr_registered`` is the registered one's ``psnr``."""
        own = name.removesuffix("_registered")
        holder = self if own == name else self.registered
        value: float | None = None if holder is None else getattr(holder, own)
        return value


class Curve(Record):
    """The attack's progress, at the iterations at which it kept a snapshot."""

    iterations: list[int] = Field(description="of the attack's optimiser, at each snapshot")
    objective: list[float] = Field(description="what the attack minimised (the adversary sees this)")
    psnr: list[float] = Field(description="mean PSNR in dB (the adversary does not see this)")


class ImageDetail(Record):
    """Of one run of an attack on images, volumes or signals."""

    example_noun: str = Field(default="images", description="what its images are: images, volumes or signals")
    images: list[ImageResult] = Field(default=[], description="of an attack on images, one a victim")
    certified: int | None = optional("images that the attack vouched for without the truth; null: it vouches for none")
    certified_wrong: int | None = optional("of these, how many are no image of the client's, checked with the truth")
    matching: float | None = optional(
        "of the images that the attack tied to updates of several rounds, the share that are the same "
        "example in each of them"
    )
    curve: Curve | None = optional("how the attack went on; null: not kept")


class NamedSummary(Record):
    """How many victims were named by one way of comparing pictures; of several tries of a victim, by any."""

    by: Look = Field(description="how pictures were compared")
    of: Literal["image", "person"] = Field(description="what was named")
    named: int = Field(description="how many of the victims")
    victims: int = Field(description="of whom that was asked")
    candidates: int = Field(description="among how many one was named, at least")
    by_luck: float = Field(description="how many victims luck names on average")
    p_value: float = Field(description="of luck naming as many (one-sided exact test, Poisson binomial)")


class ImageSummary(Record):
    """Of all runs of an attack on images, volumes or signals on one federation."""

    psnr: Interval | None = optional(
        "in dB, over the different victims, as all that follows: of a victim's several tries the best by the verdicts' "
        "rules; null: no images"
    )
    psnr_of_tries: float | None = optional("in dB, mean over all tries; null: each victim was tried once")
    mse: Interval | None = optional("of pixels in [0, 1]")
    ssim: Interval | None = optional("over images or volumes")
    correlation: Interval | None = optional("over signals")
    lpips: Interval | None = optional("over images; null: see lpips_missing")
    psnr_registered: Interval | None = optional("PSNR after each image's best shift and flip")
    ssim_registered: Interval | None = optional("SSIM after it")
    psnr_mean_image_registered: float | None = optional("baseline: the mean image, alike")
    identification_rate: float | None = optional("share of victims whose image has rank 1")
    named: list[NamedSummary] = Field(default=[], description="how often reconstructions name their image or person")
    named_text: str = Field(default="", description="the same in words")
    label_accuracy: float | None = optional("share of labels recovered; null: they were given")
    psnr_mean_image: float | None = optional("baseline: mean PSNR of the candidates' mean image")
    psnr_same_class: float | None = optional("baseline: mean PSNR of a random other image of the class")
